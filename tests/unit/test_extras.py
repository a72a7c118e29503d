"""Optional packages that are missing are told in one line."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gateway
from gateway.extras import MissingExtra, is_missing, load_figure, load_optuna, load_zmq


def test_a_missing_package_is_told_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(MissingExtra, match=r"`kv_events` needs the extra `events`: pip install"):
        load_zmq("`kv_events`")


def test_nothing_but_the_feature_imports_zmq() -> None:
    """Checked in the modules' text: tests have imported it already."""
    root = Path(gateway.__file__).parent
    importing = [path.name for path in root.rglob("*.py") if "import zmq" in path.read_text()]
    assert importing == []


@pytest.mark.parametrize(
    ("extra", "module"),
    [
        ("tokens", "jinja2"),
        ("tokens", "tokenizers"),
        ("events", "zmq"),
        ("otel", "opentelemetry.sdk"),
        ("otel", "opentelemetry"),
    ],
)
def test_an_extra_is_missing_when_one_of_its_packages_is(
    extra: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_missing(extra)
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert is_missing(extra)


@pytest.mark.parametrize(
    ("module", "load"), [("optuna", load_optuna), ("matplotlib.figure", load_figure)]
)
def test_what_tune_needs_is_told_likewise(
    module: str, load: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"^tune needs the extra `tune`: pip install"):
        load("tune")
