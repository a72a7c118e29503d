import typing

import msgspec
import pytest

from gateway.config.forms import FORMS
from gateway.config.meta import KeyInfo, describe, is_section, keys_of
from gateway.config.schema import BucketConfig, Config, KeyConfig, ListenConfig, ModelConfig


def _every_key(section: type[msgspec.Struct] = Config) -> list[KeyInfo]:
    found = []
    for info in keys_of(section).values():
        found.append(info)
        if info.section is not None:
            found += _every_key(info.section)
    return found


def test_every_key_says_what_it_means_in_one_line() -> None:
    for info in _every_key():
        assert info.key.help.endswith("."), info.name
        assert "\n" not in info.key.help


def test_every_key_named_after_a_unit_states_it() -> None:
    units = {"_s": "s", "_mib": "MiB", "_kib": "KiB", "_bytes": "B"}
    for info in _every_key():
        for suffix, unit in units.items():
            if info.name.endswith(suffix):
                assert info.key.unit == unit, info.name


def test_every_text_is_checked_by_a_form_that_exists() -> None:
    for info in _every_key():
        if info.kind in {str, list[str]}:
            assert info.key.form in FORMS, info.name


def test_every_default_is_in_its_own_range() -> None:
    for info in _every_key():
        if info.kind in {int, float} and isinstance(info.default, int | float):
            assert info.key.ge is None or info.default >= info.key.ge, info.name
            assert info.key.gt is None or info.default > info.key.gt, info.name
            assert info.key.le is None or info.default <= info.key.le, info.name


def test_yaml_names_are_those_of_the_contract_even_for_python_words() -> None:
    assert "class" in keys_of(KeyConfig)
    assert not any(name.endswith("_") for name in keys_of(KeyConfig))


def test_sections_are_found_in_lists_and_mappings() -> None:
    assert keys_of(Config)["models"].section is ModelConfig
    assert is_section(keys_of(Config)["classes"].section)
    assert keys_of(ModelConfig)["aliases"].section is None
    assert typing.get_origin(keys_of(Config)["classes"].kind) is dict


@pytest.mark.parametrize(
    ("section", "name", "words"),
    [
        (ListenConfig, "port", "a whole number from 0 to 65,535"),
        (BucketConfig, "burst_tokens", "a number above 0, at most 1,000,000,000,000"),
        (Config, "debug_headers", "true or false"),
        (Config, "record", "text"),
        (KeyConfig, "tokens_per_minute", "a whole number of at least 1"),
    ],
)
def test_allowed_values_are_described(section: type[msgspec.Struct], name: str, words: str) -> None:
    info = keys_of(section)[name]

    assert describe(info.kind, info.key) == words
