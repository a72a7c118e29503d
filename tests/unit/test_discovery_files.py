"""A file of backends is taken whole or not at all."""

from pathlib import Path

import orjson
import pytest

from gateway.config.problems import ConfigErrors
from gateway.discovery.files import read_members


def _read(tmp_path: Path, text: str) -> list[tuple[str | None, str | None]]:
    file = tmp_path / "backends"
    file.write_text(text)
    return [(member.name, member.url) for member in read_members(str(file))]


def test_yaml_and_json_are_both_read(tmp_path: Path) -> None:
    expected = [("a", "http://h:1"), (None, "http://h:2")]

    assert _read(tmp_path, '- {name: a, url: "http://h:1"}\n- url: http://h:2\n') == expected
    data = [{"name": "a", "url": "http://h:1"}, {"url": "http://h:2"}]
    assert _read(tmp_path, orjson.dumps(data, option=orjson.OPT_INDENT_2).decode()) == expected
    odd = '[{"name":"a","url":"http:\\/\\/h:1"},\n\t{"url":"http://h:2"}]'  # no YAML, but JSON
    assert _read(tmp_path, odd) == expected
    assert _read(tmp_path, "[{name: a, url: 'http://h:1'}, {url: 'http://h:2'}]") == expected


def test_an_empty_list_is_no_backend_at_all(tmp_path: Path) -> None:
    assert _read(tmp_path, "[]") == []


def test_what_a_backend_of_the_configuration_may_state_may_stand_here(tmp_path: Path) -> None:
    file = tmp_path / "backends"
    file.write_text("- {url: 'http://h:1', engine: vllm, api_key_env: K, kv_events: 'tcp://h:9'}")
    (member,) = read_members(str(file))

    assert (member.engine, member.api_key_env, member.kv_events) == ("vllm", "K", "tcp://h:9")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a list"),
        ("null", "not a list"),
        ("backends: []", "not a list"),
        ('[{"name":"a","url":"http://h:1"},', "not valid YAML"),
        ("- {name: a, url: 'http://h:1'}\n- {name: b, ur", "not valid YAML"),
        ("- {name: a}", "the backend has no address"),
        ("- {url: h:1}", "is not valid"),
        ("- {url: 'http://h:1', unknown: 1}", "unknown key"),
        ("- {dns: h, port: 1}", "a listed backend has an address"),
        ("- {file: /x}", "a listed backend has an address"),
        ("- {name: a, url: 'http://h:1'}\n- {name: a, url: 'http://h:2'}", "already another"),
        ("- {url: 'http://h:1'}\n- {url: 'http://h:1/'}", "listed twice"),
        ("- &a {url: 'http://h:1'}\n- 5", "is not valid"),
        ("[" * 100, "not valid YAML"),
        (f"[{'{},' * 300}]", "no address"),
        ("- {url: 'http://h:1'}\n" + " " * 1024 * 1024, "too large"),
    ],
)
def test_a_file_with_a_mistake_is_refused_whole(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigErrors, match=message) as caught:
        _read(tmp_path, text)
    assert all(problem.file.endswith("backends") for problem in caught.value.problems)


def test_more_backends_than_the_index_has_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="at most 256"):
        _read(tmp_path, "".join(f"- url: http://h:{port}\n" for port in range(1, 258)))


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_members(str(tmp_path / "none"))
