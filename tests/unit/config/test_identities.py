"""Backends of which a part is unreadable: the rest is judged, and nothing is guessed."""

from pathlib import Path

import pytest

from tests.unit.config import problems_of


def _keys(tmp_path: Path, text: str) -> list[str]:
    return [problem.key for problem in problems_of(tmp_path, text)]


@pytest.mark.parametrize(
    ("items", "keys"),
    [
        ("{name: a, url: x}, {name: a, url: 'http://h:2'}", ["[0].url", "[1].name"]),
        ("{name: a, url: 'http://h:2'}, {name: a, url: x}", ["[1].url", "[1].name"]),
        ("{name: a, url: x}, {name: a, url: y}", ["[0].url", "[1].url", "[1].name"]),
        ("{name: a, dns: h}, {name: a, dns: h, port: 1}", ["[0].port", "[1].name"]),
        (
            "{name: a b, url: 'http://h:1'}, {url: 'http://h:1'}",
            ["[0].name", "[1].url"],
        ),
        ("{name: a, url: x, port: 5}", ["[0].url", "[0].port"]),
        ("{name: a, url: x, dns: h, port: 5}", ["[0].url", "[0].dns"]),
        (
            "{name: a b, url: x, api_key_env: A, api_key_file: b}",
            ["[0].name", "[0].url", "[0].api_key_file"],
        ),
        (
            "{name: a, url: 'http://h:1', api_key_env: A-B, api_key_file: b}",
            ["[0].api_key_env", "[0].api_key_file"],
        ),
        (
            "{name: a, url: 'http://h:1'}, {name: b, url: 'http://h:2'}, {name: b, url: 'http://h:1'}",
            ["[2].name", "[2].name"],
        ),
        ("{name: a, url: x}, {5: y, name: a, url: 'http://h:2'}", ["[0].url", "[1]", "[1].name"]),
        ("{name: a, url: x}, {5: y}", ["[0].url", "[1]", "[1].url"]),
    ],
)
def test_an_unreadable_part_hides_no_mistake(tmp_path: Path, items: str, keys: list[str]) -> None:
    found = _keys(tmp_path, f"backends: [{items}]")

    assert sorted(found) == sorted(f"backends{key}" for key in keys)


def test_a_name_used_twice_is_shown_with_the_first_ones_line(tmp_path: Path) -> None:
    text = "backends:\n- {name: a, url: x}\n- {name: a, url: 'http://h:2'}\n"

    last = problems_of(tmp_path, text)[-1]

    place = f"{tmp_path / 'g.yaml'}"
    assert str(last) == (
        f"{place}:3: backends[1].name: 'a' is already the backend on {place}:2, "
        "expected a name of its own"
    )


@pytest.mark.parametrize(
    "text",
    [
        # a reference to a backend whose own address is wrong
        "models: [{name: m, backends: [{name: a}]}]\nbackends: [{name: a, url: x}]",
        # perhaps one backend, once its address is mended
        "models: [{name: m, backends: [{name: a, url: x}]}]\nbackends: [{name: a, url: 'http://h'}]",
        # perhaps the second `backends` has it
        "models: [{name: m, backends: [{name: a}]}]\nbackends: []\nbackends: [{}]",
        "backends: [{<<: 5, name: a}]",
        "backends: [7]",
    ],
)
def test_what_cannot_be_known_is_not_a_mistake(tmp_path: Path, text: str) -> None:
    assert len(problems_of(tmp_path, text)) == 1


@pytest.mark.parametrize(
    "first", ["{name: a, url: 'http://h:1', engine: vllm}", "{name: a, url: x, engine: vllm}"]
)
@pytest.mark.parametrize("swap", [False, True])
def test_a_reference_that_disagrees_is_found_in_either_order(
    tmp_path: Path, first: str, swap: bool
) -> None:
    lists = [first, "{name: a, engine: sglang}"]
    one, other = reversed(lists) if swap else lists
    text = f"models:\n- {{name: m, backends: [{one}]}}\n- {{name: n, backends: [{other}]}}\n"

    assert "models[1].backends[0].engine" in _keys(tmp_path, text)


def test_a_disagreement_is_found_beyond_a_listing_that_states_nothing(tmp_path: Path) -> None:
    engines = ("auto", "vllm", "sglang")
    rows = [
        f"- {{name: m{i}, backends: [{{name: a, url: 'http://h:1', engine: {engine}}}]}}"
        for i, engine in enumerate(engines)
    ]

    assert _keys(tmp_path, "models:\n" + "\n".join(rows)) == ["models[2].backends[0].engine"]


def test_backends_whose_address_is_wrong_count_towards_the_most(tmp_path: Path) -> None:
    items = [f"{{url: 'http://h:{port}'}}" for port in range(1, 257)]

    assert _keys(tmp_path, f"backends: [{', '.join(items)}, {{url: x}}]") == [
        "backends[256].url",
        "",
    ]
    assert "257 backends" in str(
        problems_of(tmp_path, f"backends: [{', '.join(items)}, {{name: q, url: x}}]")[-1]
    )
