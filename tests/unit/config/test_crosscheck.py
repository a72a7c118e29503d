from pathlib import Path

import pytest

from gateway.config.schema import Config
from tests.unit.config import ONE_BACKEND, keys_and_lines, load_text, problems_of

HASH = "0" * 64

SIX_AND_MORE = f"""\
listen: {{prot: 8080}}
admin: {{port: "9090"}}
limits:
  body_mib: 100000
models:
  - name: m
    backends:
      - {{name: a, url: "http://h:1"}}
      - {{name: a, url: "http://h:2"}}
routing:
  policy: fastest
classes:
  coding:
    default: true
  chat:
    default: true
    bucket: {{tokens_per_second: 5}}
keys:
  - {{name: t, sha256: deadbeef}}
  - {{name: u, sha256: "{HASH}", class: nope}}
log: {{level: info}}
log: {{level: debug}}
"""


def test_every_mistake_of_a_file_is_listed_with_its_line(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, SIX_AND_MORE)

    assert keys_and_lines(problems) == [
        (1, "listen.prot"),
        (2, "admin.port"),
        (4, "limits.body_mib"),
        (9, "models[0].backends[1].name"),
        (11, "routing.policy"),
        (16, "classes.chat.default"),
        (17, "classes.chat.bucket.burst_tokens"),
        (19, "keys[0].sha256"),
        (20, "keys[1].class"),
        (22, "log"),
    ]
    assert all(problem.allowed for problem in problems)


ENGINES = """\
models: [{name: m, backends: [{url: 'http://h:1', engine: vllm}]}]
backends: [{url: 'http://h:1', engine: sglang}]
"""
MODELS = "models: [{name: m, aliases: [n], backends: [{name: a, url: 'http://h:1'}]}]\n"


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("listen: {port: 8080}", "models", "no backend is given"),
        ("models: [{name: m}]", "models[0].backends", "the model has no backend"),
        (ONE_BACKEND + "admin: {port: 8080}", "admin.port", "the same address as listen"),
        (
            MODELS.replace("[n]", "[n, m]"),
            "models[0].aliases[1]",
            "'m' is already given on",
        ),
        ("backends: [{name: a}]", "backends[0].url", "the backend has no address"),
        ("backends: [{}]", "backends[0].url", "the backend has no address"),
        ("backends: [{dns: x}]", "backends[0].port", "dns is given without port"),
        (
            "backends: [{url: 'http://h:1', dns: x, port: 1}]",
            "backends[0].dns",
            "both url and dns",
        ),
        ("backends: [{url: 'http://h:1', port: 1}]", "backends[0].port", "port belongs to dns"),
        (
            "backends: [{url: 'http://h:1', api_key_env: A, api_key_file: b}]",
            "backends[0].api_key_file",
            "api_key_env is given as well",
        ),
        (
            "backends: [{url: 'http://h:1'}, {url: 'http://h:1/'}]",
            "backends[1].url",
            "'backend-1' is listed twice",
        ),
        (
            "backends: [{name: a, url: 'http://h:1'}, {name: b, url: 'http://h:1'}]",
            "backends[1].name",
            "'b' has the same address as 'a'",
        ),
        (
            MODELS + "backends: [{name: a, url: 'http://h:2'}]",
            "backends[0].name",
            "'a' is already another backend",
        ),
        (
            ENGINES,
            "backends[0].engine",
            "differs from the same backend",
        ),
        (
            ONE_BACKEND + "routing: {weights: {prefix: 0, queue: 0, kv: 0}}",
            "routing.weights",
            "all weights are 0",
        ),
        (ONE_BACKEND + "classes: {a: {}, b: {}}", "classes", "no class is the default"),
        (
            ONE_BACKEND + "classes: {a: {default: true, share: 0.7}, b: {share: 0.4}}",
            "classes",
            "the shares add up to 1.1",
        ),
        (
            ONE_BACKEND + "classes: {a: {match: [{}]}}",
            "classes.a.match[0]",
            "the rule has no condition",
        ),
        (
            ONE_BACKEND + "classes: {a: {match: [{key: nobody}]}}",
            "classes.a.match[0].key",
            "no key is named 'nobody'",
        ),
        (
            ONE_BACKEND + "classes: {a: {match: [{min_prompt_tokens: 9, max_prompt_tokens: 8}]}}",
            "classes.a.match[0].max_prompt_tokens",
            "below min_prompt_tokens",
        ),
        (
            ONE_BACKEND + f"keys: [{{name: k, sha256: '{HASH}', class: nope}}]",
            "keys[0].class",
            "no class is named 'nope'",
        ),
        (
            ONE_BACKEND
            + f"keys: [{{name: k, sha256: '{HASH}'}}, {{name: k, sha256: '{'1' * 64}'}}]",
            "keys[1].name",
            "the same name as on",
        ),
        (
            ONE_BACKEND
            + f"keys: [{{name: k, sha256: '{'A' * 64}'}}, {{name: l, sha256: '{'a' * 64}'}}]",
            "keys[1].sha256",
            "the same sha256 as on",
        ),
    ],
)
def test_a_contradiction_is_exactly_one_mistake(
    tmp_path: Path, text: str, key: str, part: str
) -> None:
    problems = problems_of(tmp_path, text)

    assert [problem.key for problem in problems] == [key]
    assert part in problems[0].message
    assert problems[0].allowed


@pytest.mark.parametrize(
    "text",
    [
        ONE_BACKEND + f"keys: [{{name: k, sha256: '{HASH}', class: coding}}]",
        ONE_BACKEND + "classes: {only: {}}",
        ONE_BACKEND + "listen: {port: 0}\nadmin: {port: 0}",
        ONE_BACKEND + "classes: {a: {match: [{tools: false}]}}",
        MODELS + "backends: [{name: a, url: 'http://h:1'}]",
        "backends: [{name: pool, dns: x, port: 1}]",
    ],
)
def test_what_only_looks_like_a_contradiction_is_accepted(tmp_path: Path, text: str) -> None:
    assert load_text(tmp_path, text).config != Config()


def test_every_mistake_between_keys_says_what_is_expected(tmp_path: Path) -> None:
    for problem in problems_of(tmp_path, SIX_AND_MORE):
        assert problem.allowed.startswith(("expected ", "did you mean ")), problem


def test_more_backends_than_the_index_has_slots_are_a_mistake(tmp_path: Path) -> None:
    urls = [f"{{url: 'http://h:{port}'}}" for port in range(1, 258)]

    most = load_text(tmp_path, f"backends: [{', '.join(urls[:256])}]").config
    problems = problems_of(tmp_path, f"backends: [{', '.join(urls)}]")

    assert len(most.backends) == 256
    assert [str(problem).partition(": ")[2] for problem in problems] == [
        "257 backends are given, expected at most 256"
    ]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            f"keys: [{{name: k, sha256: abc, class: nosuch}}, {{name: k, sha256: '{HASH}'}}]",
            ["keys[0].sha256", "keys[0].class", "keys[1].name"],
        ),
        (
            f"classes: {{chat: {{default: 7}}}}\nkeys: [{{name: k, sha256: '{HASH}', class: no}}]",
            ["classes.chat.default", "keys[0].class"],
        ),
        (
            "classes: {a: {match: [{key: k}, {key: no}]}}\nkeys: [{name: k}]",
            ["classes.a.match[1].key", "keys[0].sha256"],
        ),
        (
            "classes: {a b: {default: true}, c: {default: true}}",
            ["classes.'a b'", "classes.c.default"],
        ),
        (
            "models:\n- {name: m, backends: [{name: a, url: x}]}\n- {name: m}",
            ["models[0].backends[0].url", "models[1].backends", "models[1].name"],
        ),
        (
            f"5: x\nkeys: [{{name: k, sha256: '{HASH}', class: nosuch}}]",
            ["", "keys[0].class"],
        ),
        (
            f"keys: [{{name: k, sha256: '{HASH}', class: nosuch}}]\nkeys: []",
            ["keys[0].class", "keys"],
        ),
    ],
)
def test_a_mistake_in_an_item_does_not_hide_its_others(
    tmp_path: Path, text: str, keys: list[str]
) -> None:
    problems = problems_of(tmp_path, ONE_BACKEND.replace("url", "name: z, url") + text)

    assert sorted(problem.key for problem in problems) == sorted(keys)


def test_what_is_wrong_with_all_classes_hides_nobody_who_names_another(tmp_path: Path) -> None:
    key = f"keys: [{{name: k, sha256: '{HASH}', class: nosuch}}]\n"
    for classes in (
        "{a: {default: true, share: 0.7}, b: {share: 0.4}}",
        "{a: {}, b: {}}",
    ):
        problems = problems_of(tmp_path, ONE_BACKEND + key + f"classes: {classes}")

        assert [problem.key for problem in problems] == ["keys[0].class", "classes"]


@pytest.mark.parametrize(
    "text",
    [
        "keys: [{name: k, sha256: '%s', class: big}]\nclasses: []",
        "keys: [{name: k, sha256: '%s', class: big}]\nclasses: {}\nclasses: {big: {}}",
        "keys: [{name: k, sha256: '%s', class: big}]\nclasses: {<<: 5, c: {}}",
        "keys: 5\nclasses: {c: {match: [{key: k}]}}",
        "listen: {port: x}\nadmin: {port: 8080}",
    ],
)
def test_what_an_unreadable_part_may_hold_is_not_called_missing(tmp_path: Path, text: str) -> None:
    problems = problems_of(tmp_path, ONE_BACKEND + text.replace("%s", HASH))

    assert len(problems) == 1


EVENTS = """\
backends:
  - {url: "http://a:1", kv_events: "tcp://*:5557"}
  - {dns: v.internal, port: 8000, kv_events: "tcp://v:5557"}
  - {url: "http://b:1", kv_replay: "tcp://b:5558"}
  - {dns: w.internal, port: 8000, kv_events: "tcp://*:5557", kv_replay: "tcp://*:6000"}
  - {url: "http://c:1", kv_events: "ipc:///run/kv", kv_replay: "ipc:///run/replay"}
"""


def test_event_endpoints_name_as_many_addresses_as_the_backend_has(tmp_path: Path) -> None:
    assert keys_and_lines(problems_of(tmp_path, EVENTS)) == [
        (2, "backends[0].kv_events"),
        (3, "backends[1].kv_events"),
        (4, "backends[2].kv_replay"),
    ]
