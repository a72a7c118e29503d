from pathlib import Path

import pytest

from tests.unit.config import ONE_BACKEND, load_text, problems_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listen: {port: eighty}", "listen.port: 'eighty' is not valid, expected a whole number"),
        ("listen: {port: 8080.0}", "listen.port: 8080.0 is not valid"),
        ("listen: {port: true}", "listen.port: true is not valid"),
        ("listen: {port: 70000}", "from 0 to 65,535"),
        ("listen: {port: -1}", "from 0 to 65,535"),
        ("listen: {port: }", "listen.port: nothing is not valid"),
        ("listen: {host: 5}", "listen.host: 5 is not valid, expected text (put it in quotes)"),
        ("listen: {host: no}", "listen.host: false is not valid"),
        ("listen: {host: [a]}", "listen.host: a list is not valid, expected text"),
        ("listen: 8080", "listen: 8080 is not valid, expected a mapping"),
        ("debug_headers: 1", "debug_headers: 1 is not valid, expected true or false"),
        ("routing: {policy: kost}", "(did you mean cost?)"),
        ("timeouts: {total_s: .nan}", "timeouts.total_s: nan is not valid"),
        ("timeouts: {total_s: .inf}", "timeouts.total_s: inf is not valid"),
        ("timeouts: {connect_s: 0}", "a number above 0, at most 300"),
        (f"limits: {{streams: 1{'0' * 200}}}", "so large a number is not valid"),
        ("cors: {origins: x}", "cors.origins: 'x' is not valid, expected a list of texts"),
        ("cors: {origins: [null]}", "cors.origins[0]: nothing is not valid"),
        ("models: [5]", "models[0]: 5 is not valid, expected a mapping"),
        ("models: [null]", "models[0]: nothing is not valid"),
        ("models: {a: b}", "models: a mapping is not valid, expected a list"),
        ("classes: [a]", "classes: a list is not valid, expected a mapping"),
        ("classes: {a b: {}}", "classes.'a b': not a name"),
        ("keys: [{name: a}]", "keys[0].sha256: is missing, expected 64 hex digits"),
        ("trusted_proxies: [10.0.0.0/40]", "expected an IP address or network"),
        ("routin: {}", "routin: unknown key, did you mean routing?"),
        (
            "routing: {xyz: 1}",
            "routing.xyz: unknown key, expected one of policy, shadow, cost, weights",
        ),
        ("models: [{backends: [{api_key: s3cr3t}]}]", "models[0].backends[0].api_key: unknown key"),
    ],
)
def test_a_wrong_value_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    lines = [str(problem) for problem in problems_of(tmp_path, text)]

    assert any(message in line for line in lines), lines
    assert all(len(line) < 500 for line in lines)


@pytest.mark.parametrize(
    "text",
    [
        "backends: [{url: 'http://h:1', api_key: s3cr3t}]",
        "backends: [{url: 'http://user:s3cr3t@h:1'}]",
        "keys: [{name: a, sha256: rg-s3cr3t}]",
    ],
)
def test_a_literal_secret_is_not_echoed(tmp_path: Path, text: str) -> None:
    assert "s3cr3t" not in "".join(str(problem) for problem in problems_of(tmp_path, text))


def test_a_section_left_empty_has_its_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, ONE_BACKEND + "routing:\nkeys:\nclasses:\nrecord:\n").config

    assert config.routing.policy == "cost"
    assert config.keys == []
    assert config.record is None


def test_whole_numbers_and_powers_of_ten_are_numbers(tmp_path: Path) -> None:
    text = ONE_BACKEND + "classes: {a: {bucket: {tokens_per_second: 6e4, burst_tokens: 5}}}"

    bucket = load_text(tmp_path, text).config.classes["a"].bucket

    assert bucket is not None
    assert (bucket.tokens_per_second, bucket.burst_tokens) == (60_000.0, 5.0)
    assert isinstance(bucket.burst_tokens, float)


def test_one_wrong_item_is_one_mistake(tmp_path: Path) -> None:
    text = "models:\n  - name: a\n    backends: [{url: 'http://h:1'}]\n  - 7\n"

    assert len(problems_of(tmp_path, text)) == 1


def test_what_is_of_no_kind_at_all_is_one_mistake(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, ONE_BACKEND + "listen: {port: !!int x}")

    assert [problem.key for problem in problems] == ["listen.port"]


def test_an_entry_with_an_unreadable_name_is_checked_all_the_same(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, ONE_BACKEND + "classes: {a b: {default: true, share: 7}}")

    assert [problem.key for problem in problems] == ["classes.'a b'", "classes.'a b'.share"]


def test_a_key_that_is_no_text_does_not_hide_a_missing_one(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, ONE_BACKEND + "keys: [{5: x, name: a}]")

    assert [problem.key for problem in problems] == ["keys[0]", "keys[0].sha256"]


def test_what_an_unreadable_merge_may_bring_is_not_called_missing(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, ONE_BACKEND + "keys: [{<<: 5, name: a}]")

    assert [problem.key for problem in problems] == ["keys[0].<<"]
