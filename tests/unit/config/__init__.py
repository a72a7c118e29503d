"""Helpers of the configuration's tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gateway.config.load import Loaded, load
from gateway.config.problems import ConfigErrors, ConfigProblem

ONE_BACKEND = 'backends: [{url: "http://h:1"}]\n'
"""The least a configuration needs."""


def load_text(
    tmp_path: Path,
    text: str,
    *,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    backends: Sequence[str] = (),
) -> Loaded:
    """Load a file with this text."""
    file = tmp_path / "g.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, env=env, overrides=overrides, backends=backends)


def problems_of(
    tmp_path: Path,
    text: str,
    *,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> list[ConfigProblem]:
    """Return the mistakes of a file with this text; it must have some."""
    with pytest.raises(ConfigErrors) as caught:
        load_text(tmp_path, text, env=env, overrides=overrides)
    return caught.value.problems


def keys_and_lines(problems: list[ConfigProblem]) -> list[tuple[int | None, str]]:
    """Return line and key path of each problem."""
    return [(problem.line, problem.key) for problem in problems]
