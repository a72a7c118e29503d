"""Case R19: every table that a request, a user or a conversation adds to has a cap.

The gateway's objects are walked, whatever they are, while requests come that have nothing in common.
A table that grows with them and is not listed here fails the test; so does one above its cap.
"""

import functools
import gc
import hashlib
import sys
import types
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.integration.rig import (
    DONE,
    Conn,
    Received,
    Rig,
    chat_event,
    get,
    ok_chat,
    post,
    running,
    usage_event,
)

CAPS = {
    # table: where its cap is, and what the test makes of it
    "BytePrompter._conversations": ("gateway.core.prompter.MAX_CONVERSATIONS", 30),
    "ChainMemo._known": ("gateway.core.chain_memo.MAX_ENTRIES", 30),
    "Classifier._left": ("gateway.core.classify._MAX_CLIENTS", 30),
    "HotPrefixes.counts": ("gateway.core.hot._HALVE_AT", 37),
    "HotPrefixes.tokens": ("gateway.core.hot._HALVE_AT", 37),
    "HotPrefixes.where": ("gateway.core.hot._HALVE_AT", 37),
    "Memory._records": ("gateway.core.explain.REMEMBERED", 30),
    "SilentPrefills._heap": ("gateway.core.ledger.MAX_SILENT", 30),
    "ResponseHomes._homes": ("gateway.edge.homes._RESPONSES_MAX", 30),
}
"""What grows with the requests served. `Node.*` are the prefix index, under `index.max_mib`."""

OPEN = {"ClientConnection._headers", "HttpRequest.picked"}
"""Of an open connection: at most `limits.header_count` fields of at most `limits.header_kib`."""

INDEX = {"Node.kids", "Node.stamps"}
INDEX_BYTES = 40_000
BATCH = 60
SLACK = 12  # of a kind, opened and closed by the rig itself


def test_r19_the_list_names_caps_that_exist() -> None:
    for where, _ in CAPS.values():
        module, _, name = where.rpartition(".")
        assert getattr(import_module(module), name) >= 1000


async def test_r19_no_table_grows_with_requests_users_or_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, cap in CAPS.values():
        module, _, name = where.rpartition(".")
        monkeypatch.setattr(f"{module}.{name}", cap)
    keys = [{"name": "team", "sha256": digest("sk-team"), "requests_per_minute": 10**9}]
    file = tmp_path / "gateway.yaml"
    file.write_bytes(orjson.dumps({"keys": keys}))
    async with running(engine, engine, file=str(file), within_s=100) as rig:
        rig.app.dispatcher._fleet.trie.max_bytes = INDEX_BYTES
        sizes = []
        for number in range(3):
            await converse(rig, number * BATCH)
            await rig.settled()
            sizes.append(tables(rig.app))

        first, _, last = sizes
        grown = {path for path, size in last.items() if size > first.get(path, 0) + SLACK}
        assert grown - CAPS.keys() - OPEN - INDEX == set()
        for table, (_, cap) in CAPS.items():
            assert any(size.get(table) for size in sizes), table  # it was filled at all
            assert last.get(table, 0) <= cap, table
        assert rig.app.dispatcher.index_bytes <= INDEX_BYTES
        assert last["Node.kids"] < INDEX_BYTES / 100
        assert len(last) > 100  # the walk still finds its way


async def test_r19_the_walk_would_find_a_table_without_a_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as rig:
        before = tables(rig.app)
        monkeypatch.setattr(rig.handler.responses, "_homes", dict.fromkeys(range(50)))
        after = tables(rig.app)
        grown = {path for path, size in after.items() if size > before.get(path, 0) + SLACK}

        assert grown == {"ResponseHomes._homes"}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def engine(conn: Conn, request: Received) -> None:
    body = orjson.loads(request.body or b"{}")
    if request.target.startswith("/v1/responses"):
        usage = {"input_tokens": 10, "output_tokens": 2}
        made = {
            "id": f"resp_{body.get('user')}",
            "object": "response",
            "output": [],
            "usage": usage,
        }
        await conn.json(made)
    elif body.get("stream"):
        await conn.sse(chat_event("a"), usage_event(prompt=6_000), DONE)
        await conn.end()
    else:
        await ok_chat(conn, request)


async def converse(rig: Rig, start: int) -> None:
    """Send all kinds of requests, each of another user, client, session and conversation."""
    client = await rig.connect()
    for i in range(start, start + BATCH):
        lines = [
            f"x-request-id: id-{i}",
            f"user-agent: agent/{i}",
            f"x-gateway-session: s{i}",
            f"x-claude-code-session-id: c{i}",
            f"x-forwarded-for: 10.0.{i >> 8}.{i & 255}",
            f"x-custom-{i}: {i}",
        ]
        team = [*lines, "authorization: Bearer sk-team"]
        messages = [{"role": "user", "content": f"{i} " * 6_000}]
        tools = [{"type": "function", "function": {"name": f"f{i}"}}]
        asked = {"model": "m", "messages": messages, "user": f"u{i}", "cache_salt": f"salt{i}"}
        for data in (
            post("/v1/chat/completions", asked | {"stream": True}, *team),
            post("/v1/chat/completions", asked | {"stream": True}, *team),  # known by now
            post("/v1/chat/completions", asked | {"tools": tools}, *team),
            post("/v1/responses", {"model": "m", "input": f"{i}", "user": f"u{i}"}, *team),
            get(f"/v1/responses/resp_u{i}", *team),
            get(f"/v1/models/m{i}", *team),
            post(f"/v1/chat/completions?x={i}", asked | {"model": f"model{i}"}, *team),
            post("/v1/chat/completions", asked, *lines, f"authorization: Bearer sk-{i}"),
            post(f"/v1/nope/{i}", asked, *team),
        ):
            await client.send(data)
            await client.answer()


Tables = dict[str, int]
CONTAINERS = (dict, list, set, deque, bytearray)


def tables(root: object) -> Tables:
    """Return the entries of every container reachable from `root` or from a module of ours.

    By the class and attribute that holds it, all objects of a class together; `[]` = what is in it.
    """
    gc.collect()
    found: Tables = {}
    seen: set[int] = set()
    stack = [(root, type(root).__name__), *module_state(found)]
    while stack:
        thing, path = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, CONTAINERS):
            found[path] = found.get(path, 0) + len(thing)
        stack.extend(within(thing, path))
    return found


def module_state(found: Tables) -> Iterator[tuple[object, str]]:
    for name, module in list(sys.modules.items()):
        if not name.startswith("gateway."):
            continue
        for attribute, value in list(vars(module).items()):
            path = f"{name}:{attribute}"
            if hasattr(value, "cache_info"):
                found[path] = value.cache_info().currsize
            elif not attribute.startswith("__") and not isinstance(value, type):
                yield value, path


def within(thing: Any, path: str) -> Iterator[tuple[object, str]]:
    if isinstance(thing, dict):
        for key, value in list(thing.items()):
            yield key, f"{path}[]"
            yield value, f"{path}[]"
    elif isinstance(thing, list | set | frozenset | deque | tuple):
        for value in list(thing):
            yield value, f"{path}[]"
    elif isinstance(thing, functools.partial):
        yield thing.args, path
        yield thing.func, path
    elif isinstance(thing, types.MethodType):
        yield thing.__self__, path
    elif type(thing).__module__.startswith("gateway") and not isinstance(thing, type):
        for name in attributes(thing):
            if (value := getattr(thing, name, None)) is not None:
                yield value, f"{type(thing).__name__}.{name}"


def attributes(thing: object) -> Iterator[str]:
    yield from getattr(thing, "__dict__", {})
    for kind in type(thing).__mro__:
        slots = getattr(kind, "__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
