"""How many clients a limit of open files allows."""

import resource

import pytest

from gateway.edge.descriptors import OpenFiles, is_shortage


@pytest.mark.parametrize(
    ("soft", "backends", "most"), [(1024, 2, 464), (1024, 64, 340), (64, 1, 14), (20, 64, 1)]
)
def test_each_client_has_one_more_for_its_backend(
    monkeypatch: pytest.MonkeyPatch, soft: int, backends: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    files = OpenFiles()
    monkeypatch.setattr(files, "_own", 16)
    assert files.clients(backends) == most


def test_no_limit_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert OpenFiles().clients(64) > 1_000_000


def test_only_a_want_of_ours_is_a_shortage() -> None:
    assert is_shortage(OSError(24, "Too many open files"))
    assert not is_shortage(ConnectionRefusedError(111, "refused"))
    assert not is_shortage(TimeoutError())
    assert not is_shortage(ValueError())
