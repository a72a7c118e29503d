import hashlib

import pytest
import yaml

from gateway.cli.main import main
from gateway.config.load import load


def test_the_line_printed_lets_the_key_in(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("team-a", "a:b", "5", "no", "[::1]:8000"):
        assert main(["key", "new", name]) == 0
        key, _, line = capsys.readouterr().out.splitlines()

        config = load(
            backends=["http://h:1"], overrides=[f"keys=[{line.removeprefix('- ')}]"]
        ).config
        assert config.keys[0].name == name
        assert config.keys[0].sha256 == hashlib.sha256(key.encode()).hexdigest()
        assert yaml.safe_load(f"keys:\n{line}")["keys"][0]["name"] == name


def test_a_key_has_32_bytes_and_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "a"]) == 0
    captured = capsys.readouterr()
    key = captured.out.splitlines()[0]

    assert key.startswith("rg-")
    assert len(key) == 3 + 43  # 32 bytes in base64url
    assert captured.out.count(key) == 1
    assert captured.err == ""


def test_two_keys_differ(capsys: pytest.CaptureFixture[str]) -> None:
    keys = set()
    for _ in range(5):
        main(["key", "new", "a"])
        keys.add(capsys.readouterr().out.splitlines()[0])

    assert len(keys) == 5


@pytest.mark.parametrize("name", ["a b", "", "x" * 200, "a\nb"])
def test_a_name_the_configuration_would_refuse_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "new", name]) == 2
    assert capsys.readouterr().out == ""
