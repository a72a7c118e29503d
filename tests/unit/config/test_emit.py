from typing import Any

import pytest
import yaml

from gateway.config.emit import emit, scalar


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        5,
        0.1,
        1e20,
        "",
        "x",
        "no",
        "5",
        "1e5",
        "a: b",
        "# c",
        "a\nb\n",
        "é😀",
        "*",
        [],
        {},
    ],
)
def test_a_scalar_is_one_line_that_reads_back(value: Any) -> None:
    text = scalar(value)

    assert "\n" not in text
    assert yaml.safe_load(f"k: {text}") == {"k": value}


def test_each_line_knows_its_key_path() -> None:
    data = {"a": {"b": 1}, "c": [{"d": 2, "e": [3]}, "f"], "g": [[]]}

    lines = list(emit(data))

    assert [(line.path, line.leaf) for line in lines] == [
        ("a", False),
        ("a.b", True),
        ("c", False),
        ("c[0].d", True),
        ("c[0].e", False),
        ("c[0].e[0]", True),
        ("c[1]", True),
        ("g", False),
        ("g[0]", True),
    ]
    assert yaml.safe_load("\n".join(line.text for line in lines)) == data
