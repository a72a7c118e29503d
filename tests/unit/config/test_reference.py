import itertools
import re
import typing
from pathlib import Path

import msgspec
import pytest
import yaml

from gateway.config.load import load
from gateway.config.meta import is_section, keys_of
from gateway.config.reference import (
    DOCS,
    REFERENCE,
    configuration_md,
    main,
    reference_yaml,
)
from gateway.config.schema import Config

ROOT = Path(__file__).parents[3]


def _key_count(section: type[msgspec.Struct], seen: set[type]) -> int:
    if section in seen:
        return 0
    seen.add(section)
    infos = keys_of(section).values()
    inner = [info.section for info in infos if info.section is not None]
    return len(infos) + sum(_key_count(part, seen) for part in inner)


def _example_of(
    section: type[msgspec.Struct], data: typing.Any, seen: set[type], *beside: typing.Any
) -> int:
    """Walk the reference's data by type; return how many keys it documents.

    `beside` are the further items of a list: each shows a key that excludes the first one's.
    """
    if section in seen:
        return 0
    seen.add(section)
    assert list(data) == list(keys_of(section))
    count = len(data)
    for info in keys_of(section).values():
        value = data[info.name]
        if info.section is None:
            if not info.required and info.key.example is None:
                assert value == info.default, info.name
            continue
        if info.key.apart:
            (value,) = (item[info.name] for item in beside if list(item) == [info.name])
        more: list[typing.Any] = []
        if not is_section(info.kind):
            value, *more = (value.values() if isinstance(value, dict) else value) or [None]
        count += _example_of(info.section, value, seen, *more)
    return count


def test_the_committed_files_are_the_generated_ones() -> None:
    hint = "run: python -m gateway.config.reference --write"

    assert (ROOT / REFERENCE).read_text(encoding="utf-8") == reference_yaml(), hint
    assert (ROOT / DOCS).read_text(encoding="utf-8") == configuration_md(), hint


def test_the_reference_warns_of_nothing_but_its_example_of_a_certificate() -> None:
    warned = {warning.key for warning in load(ROOT / REFERENCE, env={}).warnings}

    assert warned <= {"listen.tls.cert"}


def test_the_reference_has_every_key_with_its_default() -> None:
    data = yaml.safe_load(reference_yaml())

    assert _example_of(Config, data, set()) == _key_count(Config, set())


def test_every_key_of_the_reference_has_a_comment_with_its_default() -> None:
    lines = reference_yaml().splitlines()
    for above, line in itertools.pairwise(lines):
        key = re.match(r"\s*(- )?(\w+):", line)
        if key is not None and key[2] != "chat":
            assert above.lstrip().startswith("# "), line
    commented = " ".join(line.strip("# ") for line in lines)
    assert commented.count("Default: ") + commented.count("Required.") > 60


def test_the_documents_list_every_key() -> None:
    rows = [line for line in configuration_md().splitlines() if line.startswith("| `")]

    assert len(rows) == _key_count(Config, set())
    assert all(row.count(" | ") == 4 for row in rows)


def test_the_example_is_accepted_without_a_warning() -> None:
    loaded = load(ROOT / "config" / "gateway.yaml", env={})

    assert loaded.warnings == ()
    assert len(loaded.config.models[0].backends) == 2


def test_both_documents_are_printed_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == reference_yaml()
    assert main(["--docs"]) == 0
    assert capsys.readouterr().out == configuration_md()
