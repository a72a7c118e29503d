"""Request bodies and conversations for the end-to-end tests. Sends nothing by itself but `ask`."""

import random
from typing import Any

from tests.e2e.fleet import MODEL, Answer, Gateway, fetch

WORDS = [
    "parse",
    "request",
    "header",
    "token",
    "socket",
    "buffer",
    "cancel",
    "deadline",
    "stream",
    "chunk",
    "cache",
    "prefix",
    "queue",
    "route",
    "replica",
    "ledger",
    "bucket",
    "budget",
    "retry",
    "backoff",
    "metric",
    "label",
    "outcome",
    "handler",
    "parser",
]


def prose(seed: int, words: int = 400) -> str:
    """Return text that shares no prefix with another seed's."""
    rng = random.Random(seed)
    return f"Repository {seed}: " + " ".join(rng.choice(WORDS) for _ in range(words))


def opening(seed: int) -> list[dict[str, Any]]:
    """Return the first turn of a conversation with a long system prompt of its own."""
    return [
        {"role": "system", "content": prose(seed)},
        {"role": "user", "content": "Where does the handler release the socket?"},
    ]


def chat(messages: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    """Return a chat completion body; greedy and short unless told otherwise."""
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **extra}


def ask(gateway: Gateway, messages: list[dict[str, Any]], **extra: Any) -> Answer:
    """Send one chat completion through the gateway and return the whole answer."""
    url = gateway.url + "/v1/chat/completions"
    return fetch(url, method="POST", body=chat(messages, **extra))


def cached_tokens(usage: dict[str, Any]) -> int:
    """Return what the engine said it took from its cache."""
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
