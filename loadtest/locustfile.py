"""Coding and chat users for Locust: streamed conversations, with TTFT and ITL as events of their own.

    locust -f loadtest/locustfile.py --headless -u 10 -r 5 -t 20s --host http://127.0.0.1:8080

Each request gives one `POST` row (until the last byte), one `TTFT` row (until the first content)
and one `ITL` row per further content chunk, so Locust's aggregated line mixes the three: read the
rows. An error answer, an error event inside a stream and a stream without its end are failures.
A key, if the gateway wants one, comes from OPENAI_API_KEY. Point it at nothing but your own servers.
"""

import os
import random
from argparse import ArgumentParser
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import orjson
from locust import HttpUser, between, events, task

PATH = "/v1/chat/completions"
REPOSITORIES = 8
MAX_TURNS = 6
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ')} in the workspace",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read_file", "write_file", "list_directory", "run_tests")
]
WORDS = [
    *("parse", "request", "header", "token", "socket", "buffer", "cancel", "deadline", "stream"),
    *("chunk", "cache", "prefix", "queue", "route", "replica", "ledger", "bucket", "retry"),
]


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="model id; default: the first of /v1/models")
    parser.add_argument("--coding-words", type=int, default=3000, help="words of a repository")
    parser.add_argument("--chat-words", type=int, default=150, help="words of a system prompt")
    parser.add_argument("--answer-tokens", type=int, default=64, help="max_tokens of each answer")


def prose(seed: int, words: int) -> str:
    """Return text that another seed shares no prefix with."""
    rng = random.Random(seed)
    return f"{seed}: " + " ".join(rng.choice(WORDS) for _ in range(words))


class StreamFault(Exception):
    """The answer said it failed, or stopped without saying that it was done."""


def content_chunks(lines: Iterator[bytes]) -> Iterator[str]:
    """Yield the text of each content chunk of an SSE stream."""
    for line in lines:
        if line == b"data: [DONE]":
            return
        if not line.startswith(b"data: "):
            continue
        event = orjson.loads(line[6:])
        if "error" in event:
            raise StreamFault(f"error event: {event['error'].get('code')}")
        for choice in event["choices"]:
            delta = choice["delta"]
            if text := delta.get("content") or delta.get("reasoning_content"):
                yield text
    raise StreamFault("stream ended without [DONE]")


class ChatBase(HttpUser):
    """A user who holds one conversation after another; subclasses say what they are about."""

    abstract = True
    label = "base"
    tools: list[dict[str, Any]] | None = None

    def on_start(self) -> None:
        """Find the model and begin a conversation."""
        self.rng = random.Random()
        key = os.environ.get("OPENAI_API_KEY")
        self.client.headers.update({"authorization": f"Bearer {key}"} if key else {})
        self.options = self.environment.parsed_options
        self.model = self.options.model or self._first_model()
        self.messages: list[dict[str, str]] = []

    def _first_model(self) -> str:
        listed = orjson.loads(self.client.get("/v1/models").content)
        return str(listed["data"][0]["id"])

    def opening(self) -> str:
        """Return the system prompt of a new conversation."""
        raise NotImplementedError

    @task
    def turn(self) -> None:
        """Ask the next question; the answer joins the conversation if it came whole."""
        if not self.messages or len(self.messages) > 2 * MAX_TURNS:
            self.messages = [{"role": "system", "content": self.opening()}]
        question = prose(self.rng.randrange(10**9), 20)
        asked = [*self.messages, {"role": "user", "content": question}]
        answer = self.ask(asked)
        if answer is None:
            self.messages = []
        else:
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def ask(self, messages: list[dict[str, str]]) -> str | None:
        """Stream one answer; return its text, or None if it failed."""
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "temperature": 0,
            "max_tokens": self.options.answer_tokens,
        }
        if self.tools:  # sent and rendered, never called: vLLM refuses "auto" without a tool parser
            body |= {"tools": self.tools, "tool_choice": "none"}
        headers = {"content-type": "application/json"}
        began = perf_counter()
        with self.client.post(
            PATH,
            data=orjson.dumps(body),
            headers=headers,
            name=self.label,
            stream=True,
            catch_response=True,
        ) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {error_code(response.content)}")
                return None
            try:
                return self._read(response.iter_lines(chunk_size=None), began)
            except StreamFault as fault:
                response.failure(str(fault))
                return None
            finally:  # Locust's own figure ends at the head of a streamed answer
                response.request_meta["response_time"] = (perf_counter() - began) * 1000

    def _read(self, lines: Iterator[bytes], began: float) -> str:
        """Read a stream to its end; fire TTFT once and ITL for each gap."""
        text, last, kind = [], began, "TTFT"
        for piece in content_chunks(lines):
            now = perf_counter()
            self._fire(kind, now - last)
            text.append(piece)
            last, kind = now, "ITL"
        return "".join(text)

    def _fire(self, kind: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=self.label,
            response_time=seconds * 1000,
            response_length=0,
            exception=None,
            context={},
        )


def error_code(body: bytes) -> str:
    """Return the code of an error body, or its beginning."""
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return repr(body[:80])


class CodingUser(ChatBase):
    """An agent: tools, a large repository shared with other agents, little thinking."""

    weight = 1
    wait_time = between(0.2, 1.0)
    label = "coding"
    tools = TOOLS

    def opening(self) -> str:
        """Return one common instruction, then one of a few repositories."""
        repository = prose(self.rng.randrange(REPOSITORIES), self.options.coding_words)
        return f"You are a coding agent. Repository {repository}"


class ChatUser(ChatBase):
    """A person: a short system prompt of one of a few products, more thinking."""

    weight = 3
    wait_time = between(0.5, 3.0)
    label = "chat"

    def opening(self) -> str:
        """Return one of a few short system prompts."""
        return "Be helpful. " + prose(1000 + self.rng.randrange(4), self.options.chat_words)
