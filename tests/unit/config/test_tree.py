from typing import Any

import pytest

from gateway.config.problems import Report
from gateway.config.tree import MAX_BYTES, Raw, parse_file, parse_scalar


def _plain(raw: Raw) -> Any:
    if isinstance(raw.value, dict):
        return {key: _plain(item) for key, item in raw.value.items()}
    if isinstance(raw.value, list):
        return [_plain(item) for item in raw.value]
    return raw.value


def _parse(data: bytes) -> tuple[Raw | None, list[str]]:
    report = Report()
    raw = parse_file(data, "f", report)
    return raw, [str(problem) for problem in report.problems]


def test_values_know_their_line() -> None:
    raw, problems = _parse(b"a: 1\nb:\n  c: [x,\n    y]\n")

    assert raw is not None
    assert problems == []
    assert raw.value["b"].value["c"].where.line == 3
    assert raw.value["b"].value["c"].value[1].where.line == 4


def test_scalars_have_yaml_kinds_and_dates_stay_text() -> None:
    raw, _ = _parse(b"{i: 1, f: 1.5, b: yes, n: null, s: x, d: 2026-11-30, q: '1'}")

    assert raw is not None
    assert _plain(raw) == {
        "i": 1, "f": 1.5, "b": True, "n": None, "s": "x", "d": "2026-11-30", "q": "1",
    }  # fmt: skip


def test_an_empty_file_is_an_empty_mapping() -> None:
    for data in (b"", b"# nothing\n", b"\xef\xbb\xbf"):
        raw, problems = _parse(data)
        assert raw is not None
        assert raw.value == {}
        assert problems == []


def test_merge_keys_fill_what_is_not_given() -> None:
    raw, problems = _parse(b"base: &b {x: 1, y: 2}\nmade: {<<: *b, y: 3}\n")

    assert raw is not None
    assert problems == []
    assert _plain(raw)["made"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("data", "line", "part"),
    [
        (b"a: 1\nb: [", 2, "not valid YAML"),
        (b"a: 1\nb: \xff\n", 2, "not UTF-8"),
        (b"a: 1\nb: \x07\n", 2, "control character"),
        (b"[" * 5000, 1, "nested too deep"),
        (b"a: '\\ud800'\nb: \"\\U99999999\"", 1, "not valid YAML"),
        (b"---\na: 1\n---\nb: 2\n", 3, "single document"),
        (b" " * (MAX_BYTES + 1), 1, "too large"),
    ],
)
def test_unreadable_text_is_one_problem_with_its_line(data: bytes, line: int, part: str) -> None:
    raw, problems = _parse(data)

    assert raw is None
    assert len(problems) == 1
    assert problems[0].startswith(f"f:{line}: ")
    assert part in problems[0]


@pytest.mark.parametrize(
    ("data", "line", "part"),
    [
        (b"a: 1\na: 2\n", 2, "given twice, first on line 1"),
        (b"a: 1\n5: 2\n", 2, "the key 5 is not text"),
        (b"a: 1\n? [x]\n: 2\n", 2, "a key is a list"),
        (b"a: 1\nb: !!python/object:os.system x\n", 2, "not a value of kind"),
        (b"a: !!int x\n", 1, "not a value of kind"),
        (b'a: "\\ud83d"\n', 1, "not a value of kind"),
        (b"<<: 5\n", 1, "<< needs a mapping"),
        (b"a: &x [*x]\n", 1, "too many values or levels"),
    ],
)
def test_a_wrong_part_is_reported_and_the_rest_is_read(data: bytes, line: int, part: str) -> None:
    raw, problems = _parse(data)

    assert raw is not None
    assert problems[0].startswith(f"f:{line}: ")
    assert part in problems[0]


def test_an_alias_bomb_is_a_mistake_and_not_an_outage() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]

    raw, problems = _parse("\n".join(lines).encode())

    assert raw is not None
    assert any("too many values" in problem for problem in problems)


def test_a_variable_may_hold_yaml_or_text_that_is_none() -> None:
    assert _plain(parse_scalar("{a: [1, x]}", "V")) == {"a": [1, "x"]}
    assert _plain(parse_scalar("@not: yaml: [", "V")) == "@not: yaml: ["
    assert _plain(parse_scalar("", "V")) is None
