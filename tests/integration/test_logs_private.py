"""No log line holds anything of a body, a header or a key, however a request ends.

A secret is a mark and random digits; every value a client or an engine can choose gets one of its
own. What remains in the lines is the request id where the client chose a proper one.
"""

import asyncio
import contextlib
import hashlib
import io
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from gateway import tasks
from gateway.config.schema import LogConfig
from gateway.telemetry.logs import setup
from tests.integration.rig import (
    Answer,
    Conn,
    Received,
    Rig,
    chat_event,
    eventually,
    get,
    ok_chat,
    post,
    running,
)

CHAT = "/v1/chat/completions"
MARK = "s3cr3t"
HEADERS = (
    "x-session-id",
    "x-gateway-session",
    "x-gateway-class",
    "x-stainless-read-timeout",
    "x-forwarded-for",
    "user-agent",
    "cookie",
    "traceparent",
    "accept-encoding",
    "origin",
)


class Secrets:
    """Draws secrets, and puts them wherever there is room."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.key = self.text()

    def text(self) -> str:
        return f"{MARK}-{self._rng.getrandbits(64):x}"

    def odd(self) -> Any:
        """Return a value of any kind with secrets in it."""
        kinds: list[Callable[[], Any]] = [
            self.text,
            lambda: [self.text(), self.text()],
            lambda: {self.text(): self.text()},
            lambda: f"{self.text()}\n\u2028{self.text()}",
        ]
        return self._rng.choice(kinds)()

    def body(self, **more: Any) -> dict[str, Any]:
        message = {"role": "user", "content": self.text(), "name": self.text()}
        tool = {"type": "function", "function": {"name": self.text(), "parameters": {}}}
        fields = {
            "user": self.text(),
            "metadata": self.odd(),
            "stop": [self.text()],
            "tools": [tool],
            self.text(): self.odd(),
        }
        return {"model": "m", "messages": [message], **fields, **more}

    def lines(self, ending: str = "ok") -> list[str]:
        lines = [f"{name}: {self.text()}" for name in HEADERS]
        lines += [f"x-{self.text()}: {self.text()}", f"x-request-id: {self.text()} not an id"]
        return [*lines, f"authorization: Bearer {self.key}", f"x-ending: {ending}"]


async def engine(conn: Conn, request: Received) -> None:
    """End as the request asks, quoting it wherever an engine may."""
    ending, quoted = request.header("x-ending"), request.body
    if ending == "4xx":
        await conn.json({"error": {"message": quoted.decode()}}, 400)
    elif ending == "5xx":
        await conn.json(quoted, 500)
    elif ending == "garbage":
        await conn.write(b"HTTP/1.1 200 %b\r\nx: y\r\nnot a header %b\r\n\r\n" % ((quoted,) * 2))
    elif ending == "reset":
        conn.reset()
    elif ending in ("cut", "truncated"):
        await conn.sse(chat_event(quoted.decode()))
        if ending == "cut":
            conn.reset()
        else:
            await conn.end()
    elif ending == "told":
        await conn.sse(b"data: " + orjson.dumps({"error": {"message": quoted.decode()}}) + b"\n\n")
        await conn.end()
    elif ending == "silent":
        await conn.gone()
    else:
        await ok_chat(conn, request)


@contextlib.asynccontextmanager
async def logged(
    secrets: Secrets, form: str, *settings: str
) -> AsyncIterator[tuple[Rig, io.BytesIO]]:
    """Run a gateway whose log is kept."""
    stream = io.BytesIO()
    digest = hashlib.sha256(secrets.key.encode()).hexdigest()
    keys = f"keys=[{{name: team, sha256: '{digest}', choose_class: true}}]"
    logs = setup(LogConfig(format=form, level="debug"), stream)  # type: ignore[arg-type]
    try:
        async with running(engine, settings=(keys, *settings)) as rig:
            rig.app.telemetry.log = logs.access
            yield rig, stream
    finally:
        logs.close()


def lines_of(stream: io.BytesIO) -> list[bytes]:
    return stream.getvalue().splitlines()


async def _endings(rig: Rig, secrets: Secrets) -> list[Answer]:
    """Send a request for every ending that a client or an engine can cause."""

    def to_chat(ending: str = "ok", **more: Any) -> bytes:
        return post(CHAT, secrets.body(**more), *secrets.lines(ending))

    wrong_key = [line for line in secrets.lines() if not line.startswith("authorization")]
    requests = [
        to_chat(),
        to_chat(stream=True),
        *(to_chat(ending) for ending in ("4xx", "5xx", "garbage", "reset")),
        *(to_chat(ending, stream=True) for ending in ("truncated", "told")),
        to_chat(model=secrets.text()),
        to_chat(messages=secrets.odd()),
        to_chat(stream=secrets.text(), max_tokens=secrets.text()),
        post(CHAT, secrets.text().encode(), *secrets.lines()),
        post(CHAT, f'{{"model": "{secrets.text()}'.encode(), *secrets.lines()),
        post(CHAT, b'{"model": "\\ud83d%b"}' % secrets.text().encode(), *secrets.lines()),
        post(CHAT, secrets.body(), *wrong_key, f"x-api-key: {secrets.text()}"),
        post(CHAT, secrets.body(), *secrets.lines(), f"content-encoding: {secrets.text()}"),
        post(CHAT, secrets.text().encode(), *secrets.lines(), "content-encoding: gzip"),
        post(f"{CHAT}?{secrets.text()}={secrets.text()}", secrets.body(), *secrets.lines()),
        post(f"/v1/{secrets.text()}", secrets.body(), *secrets.lines()),
        post("/v1/messages", secrets.body(max_tokens=5), *secrets.lines("5xx")),
        post("/v1/responses", {"model": "m", "input": secrets.odd()}, *secrets.lines("4xx")),
        get(f"/v1/responses/{secrets.text()}", *secrets.lines()),
        get(f"/v1/models/{secrets.text()}", *secrets.lines()),
        get("/v1/models", *secrets.lines(), method=secrets.text().upper()),
        b"%b no http at all\r\n\r\n" % secrets.text().encode(),
    ]
    return [await rig.ask(request) for request in requests]


@pytest.mark.parametrize("form", ["json", "console"])
async def test_nothing_of_a_request_is_in_a_line_however_it_ends(form: str) -> None:
    secrets = Secrets(1)
    async with logged(secrets, form) as (rig, stream):
        answers = await _endings(rig, secrets)
        client = await rig.connect()  # one that leaves, and one that is cut in mid-stream
        await client.send(post(CHAT, secrets.body(stream=True), *secrets.lines("silent")))
        await eventually(lambda: bool(rig.handler.live))
        client.reset()
        cut = await rig.connect()
        await cut.send(post(CHAT, secrets.body(stream=True), *secrets.lines("cut")))
        await cut.answer()
        await rig.settled()

    assert {answer.status for answer in answers} >= {200, 400, 401, 404, 415, 500, 502}
    lines = lines_of(stream)
    assert len([line for line in lines if b"/v1/chat/completions" in line]) >= 15
    assert [line for line in lines if MARK.encode() in line.lower()] == []


FAULTS = {
    "reading it": "gateway.edge.exchange.build_query",
    "asking for a backend": "gateway.core.queued.QueuedDispatcher.admit",
    "sending it": "gateway.relay.relay.Relay.start",
    "its answer's head": "gateway.edge.attempts.Attempts.relay_started",
    "its answer": "gateway.core.scan.Scanner.keep",
    "its settlement": "gateway.core.queued.QueuedDispatcher.finish",
}


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("place", FAULTS)
async def test_a_fault_of_ours_is_told_with_its_place_and_without_its_words(
    form: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = Secrets(2)

    def fails(*_: object, **__: object) -> None:
        try:
            dict[str, str]()[secrets.text()]
        except KeyError as cause:
            raise RuntimeError(f"cannot do with {secrets.odd()}") from cause

    async with logged(secrets, form) as (rig, stream):
        with monkeypatch.context() as patch:
            patch.setattr(FAULTS[place], fails)
            client = await rig.connect()
            await client.send(post(CHAT, secrets.body(stream=True), *secrets.lines()))
            with contextlib.suppress(asyncio.IncompleteReadError):
                await client.reader.readuntil(b"\r\n\r\n")
            await rig.settled()

    text = stream.getvalue()
    assert MARK.encode() not in text.lower()
    assert b"RuntimeError" in text
    assert b"KeyError" in text
    assert b"in fails" in text


async def test_a_crash_outside_of_an_exchange_is_told_likewise() -> None:
    secrets = Secrets(3)

    async def crash() -> None:
        raise ValueError(secrets.text())

    def call(_: str) -> None:
        raise ValueError(secrets.text())

    async with logged(secrets, "json") as (_, stream):
        task = tasks.spawn(crash(), name="a task of the gateway")
        asyncio.get_running_loop().call_soon(call, secrets.text())
        await asyncio.wait([task])
        await asyncio.sleep(0)

    text = stream.getvalue()
    assert MARK.encode() not in text
    assert text.count(b'ValueError"}') == 2
    assert b"a task of the gateway crashed" in text


async def test_asyncios_own_words_are_kept_up_to_the_arguments() -> None:
    secrets = Secrets(4)
    async with logged(secrets, "json") as (_, stream):
        words = (
            f"Exception in callback call({secrets.text()!r}) at x.py:1\nhandle: {secrets.text()}"
        )
        logging.getLogger("asyncio").error(words)

    assert MARK.encode() not in stream.getvalue()
    assert b"Exception in callback call" in stream.getvalue()
