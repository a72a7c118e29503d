import pytest

from gateway.config.keys import Key


@pytest.fixture
def idle_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for a schema with a key that nothing acts on: today there is none."""
    in_effect = property(lambda key: not key.help.startswith("File that gets a line per request"))
    monkeypatch.setattr(Key, "in_effect", in_effect)
