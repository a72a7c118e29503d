"""Backends listed in a file of JSON or YAML, read again when it changes.

A file that cannot be used, half-written or wrong in a single entry, changes nothing: it is taken
whole or not at all. Reads in a thread.
"""

import asyncio
from pathlib import Path

import orjson

from gateway.config.backends import group_key
from gateway.config.crosscheck import cross_check
from gateway.config.groups import Members
from gateway.config.problems import ConfigErrors, Report, Where
from gateway.config.tree import MAX_BYTES, Raw, parse_file, raw_of
from gateway.config.validate import Validator
from gateway.discovery.source import Settings, Told
from gateway.filewatch import FileWatch


class FileSource:
    """The list in the file at `path`."""

    def __init__(self, path: str, settings: Settings) -> None:
        self._path = path
        self._watch = FileWatch(path, lambda: settings().file_interval_s)

    async def follow(self, told: Told) -> None:
        """Report the list now and after every change of the file."""
        await self._watch.take()
        while True:
            try:
                members = await asyncio.to_thread(read_members, self._path)
            except ConfigErrors as errors:
                told.failed(_first_of(errors))
            except OSError as error:
                told.failed(f"{self._path} cannot be read: {error.strerror}")
            else:
                told.found(members)
            await self._watch.changed()


def read_members(path: str) -> Members:
    """Return the backends that a file lists.

    Raises:
        ConfigErrors: it is no list of backends.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    report = Report()
    root = _tree(data, path, report)
    top = Where(path, 1)
    if root is not None and not isinstance(root.value, list):
        report.add(root.where, "", "the file is not a list", "expected - {name: ..., url: ...}")
    report.raise_any()
    assert root is not None
    validator = Validator(report)
    config = validator.config(Raw({"backends": root}, top))
    for index, backend in enumerate(config.backends):
        if group_key(backend) is not None:
            key = f"backends[{index}]"
            report.add(
                validator.places[key], key, "a listed backend has an address", "expected url"
            )
    if config.backends:
        cross_check(config, validator.places, top, report)
    report.raise_any()
    return tuple(config.backends)


def _tree(data: bytes, path: str, report: Report) -> Raw | None:
    """Return what the file holds: JSON if it is JSON, which is not all YAML, else YAML."""
    if data.lstrip()[:1] in (b"[", b"{") and len(data) <= MAX_BYTES:
        try:
            return raw_of(orjson.loads(data), Where(path, 1))
        except (orjson.JSONDecodeError, RecursionError):
            pass  # then YAML in flow style, or a mistake that the YAML parser shows the line of
    return parse_file(data, path, report)


def _first_of(errors: ConfigErrors) -> str:
    more = len(errors.problems) - 1
    return f"{errors.problems[0]}" + (f" (mistakes beside this one: {more})" if more else "")
