from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.cli.check import effective_yaml
from gateway.config.build import core_settings
from gateway.config.load import Loaded, load
from gateway.config.meta import is_section, item_of, keys_of
from gateway.config.problems import ConfigErrors
from gateway.config.schema import BackendConfig, BucketConfig, ClassConfig, Config, TimeoutsConfig

_FEW = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "g.yaml"


def _attempt(file: Path, **layers: Any) -> Loaded | ConfigErrors:
    """Load; anything but a Loaded or ConfigErrors fails the test by itself."""
    try:
        loaded = load(file, **layers)
    except ConfigErrors as errors:
        str(errors.problems[0]).encode()
        return errors
    core_settings(loaded.config, {})
    "\n".join(effective_yaml(loaded)).encode()
    return loaded


_WORDS = sorted(
    {name for section in (Config, ClassConfig, BackendConfig) for name in keys_of(section)}
)

_YAML = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.binary(max_size=4)
    | st.sampled_from(["http://h:1", "cost", "a", "*", "0" * 64]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(_WORDS) | st.text(max_size=3) | st.integers(), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def _nearly(kind: Any) -> st.SearchStrategy[Any]:
    """Values of about the right shape for a type of the schema: the deep branches get reached."""
    if is_section(kind):
        keys = {name: _nearly(info.kind) for name, info in keys_of(kind).items()}
        return st.fixed_dictionaries({}, optional=keys)
    inner = item_of(kind)
    if inner is not None and getattr(kind, "__origin__", None) is list:
        return st.lists(_nearly(inner), max_size=2)
    if inner is not None:
        return st.dictionaries(st.sampled_from(["a", "b", "coding"]), _nearly(inner), max_size=2)
    return st.sampled_from(
        [
            None,
            True,
            0,
            1,
            8080,
            0.5,
            -1,
            10**400,
            "a",
            "http://h:1",
            "http://h:2",
            "cost",
            "0" * 64,
        ]
    )


_YAML_ALPHABET = st.text(alphabet="ab:- \n[]{}&*!<?|>'\"%@,#0.\t", max_size=60)


@_FEW
@given(data=st.binary(max_size=200) | _YAML_ALPHABET.map(str.encode))
@example(data=b"\xff\xfea\x00")
@example(data=b"? ? ? a")
@example(data=b"a: &a\n  <<: *a\n")
@example(data=b"!!timestamp x")
@example(data=b"{" * 3000)
@example(data=b"%YAML 9.9\n--- a")
@example(data=b"limits: {streams: " + b"9" * 5000 + b"}")
@example(data=b"limits: {streams: 0b, body_mib: 1:99999999999, header_kib: 0x_}")
def test_any_bytes_are_a_configuration_or_its_mistakes(file: Path, data: bytes) -> None:
    file.write_bytes(data)

    _attempt(file)


@_FEW
@given(data=_YAML)
def test_any_yaml_is_a_configuration_or_its_mistakes(file: Path, data: Any) -> None:
    file.write_text(yaml.safe_dump(data), encoding="utf-8")

    _attempt(file)


@_FEW
@given(data=_nearly(Config))
def test_any_nearly_right_file_is_a_configuration_or_its_mistakes(file: Path, data: Any) -> None:
    file.write_text(yaml.safe_dump(data), encoding="utf-8")

    _attempt(file)


_PATHS = st.lists(st.sampled_from([*_WORDS, "0", "1", "x", ""]), min_size=1, max_size=4)
_TEXTS = st.text(alphabet=st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)


@_FEW
@given(
    paths=st.lists(st.tuples(_PATHS, _TEXTS), max_size=3),
    overrides=st.lists(st.tuples(_PATHS, _TEXTS), max_size=3),
    backends=st.lists(_TEXTS | st.just("http://h:9"), max_size=2),
)
def test_any_variables_and_options_are_a_configuration_or_its_mistakes(
    file: Path,
    paths: list[tuple[list[str], str]],
    overrides: list[tuple[list[str], str]],
    backends: list[str],
) -> None:
    file.write_text("models: [{name: m, backends: [{url: 'http://h:1'}]}]\n")
    env = {"RADIXGATE_" + "__".join(path).upper(): text for path, text in paths}

    _attempt(
        file,
        env=env,
        overrides=[f"{'.'.join(p)}={text}" for p, text in overrides],
        backends=backends,
    )


_SECONDS = st.floats(min_value=0.01, max_value=3_600)
_CONFIGS = st.builds(
    Config,
    backends=st.just([BackendConfig(name="a", url="http://h:1")]),
    timeouts=st.builds(TimeoutsConfig, connect_s=st.floats(0.01, 300), body_s=_SECONDS),
    classes=st.dictionaries(
        st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,8}", fullmatch=True),
        st.builds(
            ClassConfig,
            bucket=st.none()
            | st.builds(BucketConfig, tokens_per_second=_SECONDS, burst_tokens=_SECONDS),
            max_wait_s=_SECONDS,
        ),
        max_size=1,
    ),
    record=st.none() | st.text(min_size=1, max_size=20).filter(str.isprintable),
    debug_headers=st.booleans(),
)


@_FEW
@given(config=_CONFIGS)
@example(config=Config(backends=[BackendConfig(url="http://h:1")]))
def test_a_configuration_written_out_reads_back_the_same(file: Path, config: Config) -> None:
    file.write_text(yaml.safe_dump(msgspec.to_builtins(config)), encoding="utf-8")
    loaded = load(file)
    assert loaded.config == config

    file.write_text("\n".join(effective_yaml(loaded)), encoding="utf-8")

    again = load(file).config
    assert core_settings(again, {}) == core_settings(config, {})
    assert msgspec.structs.replace(again, classes={}) == msgspec.structs.replace(config, classes={})


_SOUND = f"""\
models:
- name: m
  aliases: [n]
  backends: [{{name: a, url: "http://h:1"}}, {{name: b, url: "http://h:2"}}]
- {{name: o, backends: [{{name: a}}]}}
backends: [{{name: c, url: "http://h:3"}}]
classes:
  big: {{match: [{{key: k}}, {{min_prompt_tokens: 5, max_prompt_tokens: 9}}]}}
  rest: {{default: true}}
keys:
- {{name: k, sha256: "{"1" * 64}", class: big}}
- {{name: l, sha256: "{"2" * 64}", class: rest}}
"""

_SLIPS: dict[str, tuple[str, Any]] = {
    "models.0.backends.0.url": ("models[0].backends[0].url", "h:1"),
    "models.0.backends.0.engine": ("models[0].backends[0].engine", "vlm"),
    "models.0.backends.1.name": ("models[0].backends[1].name", "a"),
    "models.0.backends.1.port": ("models[0].backends[1].port", 5),
    "models.0.aliases.0": ("models[0].aliases[0]", "m"),
    "models.1.aliases": ("models[1].aliases", 7),
    "models.1.backends.0.name": ("models[1].backends[0].url", "nosuch"),
    "backends.0.dns": ("backends[0].dns", "h"),
    "backends.0.api_key_env": ("backends[0].api_key_env", "A-B"),
    "classes.big.match.0.key": ("classes.big.match[0].key", "nosuch"),
    "classes.big.match.1.max_prompt_tokens": ("classes.big.match[1].max_prompt_tokens", 4),
    "classes.big.default": ("classes.rest.default", True),
    "classes.rest.share": ("classes.rest.share", "half"),
    "classes.rest.slow": ("classes.rest.slow", 1),
    "keys.0.sha256": ("keys[0].sha256", "abc"),
    "keys.0.class": ("keys[0].class", "nosuch"),
    "keys.1.sha256": ("keys[1].sha256", None),
    "keys.1.class": ("keys[1].class", "nosuch"),
    "keys.1.models": ("keys[1].models", "*"),
    "keys.1.name": ("keys[1].name", "k"),
    "listen.port": ("listen.port", "high"),
}
"""Where a slip is made, the key it is reported at, and the value."""


def _put(data: Any, path: str, value: Any) -> None:
    *above, last = path.split(".")
    for part in above:
        data = data[int(part)] if isinstance(data, list) else data.setdefault(part, {})
    data[int(last) if isinstance(data, list) else last] = value


@_FEW
@given(slips=st.sets(st.sampled_from(sorted(_SLIPS)), min_size=1))
@example(slips={"models.0.backends.0.url", "models.0.backends.1.name"})
@example(slips={"keys.0.sha256", "keys.0.class", "classes.rest.share"})
@example(slips=set(_SLIPS))
def test_no_mistake_hides_another(file: Path, slips: set[str]) -> None:
    data = yaml.safe_load(_SOUND)
    for path in slips:
        _put(data, path, _SLIPS[path][1])
    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")

    with pytest.raises(ConfigErrors) as caught:
        load(file)

    found = sorted(problem.key for problem in caught.value.problems)
    assert found == sorted(_SLIPS[path][0] for path in slips)


def test_what_the_slips_are_made_in_is_sound(file: Path) -> None:
    file.write_text(_SOUND, encoding="utf-8")

    assert load(file).warnings == ()
