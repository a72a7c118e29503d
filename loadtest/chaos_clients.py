"""The traffic of `make chaos`: real SDKs and raw sockets, and what each attempt saw, by request id.

Every attempt has an id of its own, so that a backend that began one twice is found. The SDKs' own
retries are off: what they would do is done here, counted.
"""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import anthropic
import openai
import orjson

TRIES = 200
_PAUSE_S = 0.3
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HONEST = {  # codes of ours, and what an engine itself may say
    429: {"rate_limited", "queue_full", "queue_timeout"},
    502: {"upstream_error"},
    503: {"no_backend", "overloaded", "draining"},
    504: {"upstream_timeout"},
}
# In Anthropic's shape there are types only.
_HONEST_TYPES = {
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "api_error",
}


class Saw(StrEnum):
    """What a client saw of one attempt."""

    OK = "ok"
    REFUSED = "refused"  # with a status and a code of the contract
    IN_BAND = "in-band error"
    LEFT = "left"  # the client itself
    CUT = "cut"  # a whole answer that broke after its head
    UNANSWERED = "unanswered"  # the connection ended, or could not be had, before any byte


@dataclass(slots=True)
class Attempt:
    """`code` is the error's, `began` when, `ended` when; loop seconds."""

    id: str
    kind: str
    saw: Saw
    code: str
    began: float
    ended: float


class Refused(Exception):
    """An answer that says no."""

    def __init__(self, status: int, code: str, headers: Any) -> None:
        self.status, self.code = status, code
        self.honest = code in _HONEST.get(status, ()) or code == _HONEST_TYPES.get(status)
        if status in (429, 503) and not headers.get("retry-after"):
            self.honest = False


class Broken(Exception):
    """A stream that was ended by an error event."""


class CutOff(Exception):
    """An answer that ended after its head, without any word."""


@dataclass
class Traffic:
    """All clients of one run."""

    port: int
    rng: random.Random
    attempts: list[Attempt] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    requests: int = 0

    async def worker(self, number: int, until: float) -> None:
        """One client after the other does one thing after the other, until the time is over."""
        loop = asyncio.get_running_loop()
        async with _sdks(self.port) as sdks:
            kinds = [
                ("openai chat stream", self._openai_stream),
                ("openai chat", self._openai),
                ("openai responses", self._responses),
                ("anthropic stream", self._anthropic_stream),
                ("anthropic", self._anthropic),
                ("raw stream", self._raw_stream),
                ("raw", self._raw),
            ]
            name, ask = kinds[number % len(kinds)]
            raw = _Kept(self.port)
            while loop.time() < until:
                await self._request(f"c{number}", name, ask, (sdks, raw))
                await asyncio.sleep(self.rng.uniform(0.0, 0.2))
            raw.close()

    async def _request(
        self, client: str, kind: str, ask: Callable[..., Awaitable[Saw]], tools: tuple[Any, Any]
    ) -> None:
        self.requests += 1
        prompt, length = self._prompt(), self.rng.randrange(4, 40)

        async def once(ident: str) -> Saw:
            return await ask(*tools, ident, prompt, length)

        code = ""
        for _ in range(TRIES):
            attempt = await self._attempt(client, kind, once)
            code = attempt.code
            if attempt.saw in (Saw.OK, Saw.LEFT, Saw.IN_BAND):
                return
            await asyncio.sleep(_PAUSE_S * self.rng.uniform(0.5, 2.0))
        self.odd.append(f"{kind}: given up after {TRIES} tries, the last {code}")

    async def _attempt(
        self, client: str, kind: str, ask: Callable[[str], Awaitable[Saw]]
    ) -> Attempt:
        loop = asyncio.get_running_loop()
        began = loop.time()
        ident = f"{client}-{len(self.attempts)}-{self.rng.getrandbits(32):08x}"
        attempt = Attempt(ident, kind, Saw.UNANSWERED, "", began, began)
        self.attempts.append(attempt)
        try:
            async with asyncio.timeout(60):
                attempt.saw = await ask(ident)
        except Refused as refused:
            attempt.saw, attempt.code = Saw.REFUSED, f"{refused.status} {refused.code}"
            if not refused.honest:
                self.odd.append(f"{kind}: refused with {attempt.code}")
        except Broken:
            attempt.saw = Saw.IN_BAND
        except CutOff:
            attempt.saw = Saw.CUT
        except TimeoutError:
            self.odd.append(f"{kind}: no end within 60 s ({ident})")
        except (OSError, asyncio.IncompleteReadError) as error:
            attempt.code = type(error).__name__
        attempt.ended = loop.time()
        return attempt

    def _prompt(self) -> str:
        """One of some conversations that share beginnings, so that there is an index to lose."""
        talk = self.rng.randrange(40)
        system = f"system {talk % 5} " * 200
        return f"{system} talk {talk} " + f"turn {talk} " * self.rng.randrange(1, 60)

    # -- the kinds ---------------------------------------------------------------------------

    async def _openai_stream(self, sdks: Any, _: Any, ident: str, prompt: str, length: int) -> Saw:
        events = 0
        leave = self.rng.randrange(1, 10) if self.rng.random() < 0.05 else 0
        with _told(lambda: events):
            stream = await sdks.openai.chat.completions.create(
                **_chat(prompt, length), stream=True, extra_headers={"x-request-id": ident}
            )
            finished = False
            async for chunk in stream:
                events += 1
                if events == leave:
                    await stream.close()
                    return Saw.LEFT
                finished |= any(choice.finish_reason for choice in chunk.choices)
        if not finished:
            raise CutOff
        return Saw.OK

    async def _openai(self, sdks: Any, _: Any, ident: str, prompt: str, length: int) -> Saw:
        with _told(int):
            answer = await sdks.openai.chat.completions.create(
                **_chat(prompt, length), extra_headers={"x-request-id": ident}
            )
        assert answer.choices[0].message.content
        return Saw.OK

    async def _responses(self, sdks: Any, _: Any, ident: str, prompt: str, length: int) -> Saw:
        events, last = 0, ""
        with _told(lambda: events):
            stream = await sdks.openai.responses.create(
                model="sim",
                input=prompt,
                max_output_tokens=length,
                stream=True,
                extra_headers={"x-request-id": ident},
            )
            async for event in stream:
                events += 1
                last = event.type
        if last == "response.failed":
            raise Broken
        if last not in ("response.completed", "response.incomplete"):
            raise CutOff
        return Saw.OK

    async def _anthropic_stream(
        self, sdks: Any, _: Any, ident: str, prompt: str, length: int
    ) -> Saw:
        events, last = 0, ""
        with _told(lambda: events):
            stream = await sdks.anthropic.messages.create(
                **_chat(prompt, length), stream=True, extra_headers={"x-request-id": ident}
            )
            async for event in stream:
                events += 1
                last = event.type
        if last != "message_stop":
            raise CutOff
        return Saw.OK

    async def _anthropic(self, sdks: Any, _: Any, ident: str, prompt: str, length: int) -> Saw:
        with _told(int):
            answer = await sdks.anthropic.messages.create(
                **_chat(prompt, length), extra_headers={"x-request-id": ident}
            )
        assert answer.content
        return Saw.OK

    async def _raw(self, _: Any, raw: Any, ident: str, prompt: str, length: int) -> Saw:
        leave = self.rng.random() < 0.05
        status, headers, body = await raw.ask(_http(ident, _chat(prompt, length)), leave=leave)
        if leave:
            return Saw.LEFT
        if status != 200:
            raise Refused(status, str(orjson.loads(body)["error"].get("code")), headers)
        assert orjson.loads(body)["choices"]
        return Saw.OK

    async def _raw_stream(self, _: Any, raw: Any, ident: str, prompt: str, length: int) -> Saw:
        wanted = {**_chat(prompt, length), "stream": True}
        status, headers, body = await raw.ask(_http(ident, wanted), leave=False)
        if status != 200:
            raise Refused(status, str(orjson.loads(body)["error"].get("code")), headers)
        if b'data: {"error"' in body:
            raise Broken
        if not body.endswith(b"data: [DONE]\n\n"):
            raise CutOff
        return Saw.OK


class _Kept:
    """A raw client that keeps its connection as long as it may."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def ask(self, request: bytes, *, leave: bool) -> tuple[int, dict[str, str], bytes]:
        """Send one request, read its answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        keep = False
        try:
            writer.write(request)
            if leave:
                await asyncio.sleep(0.01)
                return 0, {}, b""
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").lower().split("\r\n")[1:]
            headers = {name: value.strip() for name, _, value in (x.partition(":") for x in lines)}
            try:
                body = await _body(reader, headers)
            except (OSError, asyncio.IncompleteReadError) as error:
                raise CutOff from error
            keep = headers.get("connection") != "close"
            return int(head[9:12]), headers, body
        finally:
            if not keep:
                self.close()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(parts)


@dataclass
class _Sdks:
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@contextlib.asynccontextmanager
async def _sdks(port: int) -> AsyncIterator[_Sdks]:
    url = f"http://127.0.0.1:{port}"
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=50) as one,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0, timeout=50) as two,
    ):
        yield _Sdks(one, two)


@contextlib.contextmanager
def _told(events: Callable[[], int]) -> Any:
    """Turn what an SDK raises into what was seen."""
    try:
        yield
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        if error.response.status_code == 200:  # an error event of a stream
            raise Broken from error
        body: Any = error.body
        inner = body.get("error", body) if isinstance(body, dict) else {}
        code = str(inner.get("code") or inner.get("type"))
        raise Refused(error.status_code, code, error.response.headers) from error
    except (openai.APIConnectionError, anthropic.APIConnectionError) as error:
        if events():
            raise CutOff from error
        raise ConnectionError(str(error)) from error
    except (openai.APIError, anthropic.APIError) as error:
        raise Broken from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore", "httpx2"):
            raise
        if events():
            raise CutOff from error
        raise ConnectionError(str(error)) from error


def _chat(prompt: str, length: int) -> dict[str, Any]:
    return {
        "model": "sim",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": length,
    }


def _http(ident: str, body: dict[str, Any]) -> bytes:
    data = orjson.dumps(body)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
    return f"{head}x-request-id: {ident}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
