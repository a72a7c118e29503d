"""vLLM 0.32's streamed answers: one event encoder per API, event for event as recorded.

Values in, bytes of whole events out; the caller frames and sends them. An encoder's calls come in
order: `head` at once, `first` with the first token, `delta` per chunk, `tail` at the end.
"""

from typing import Any, Protocol

import orjson

from gateway.sim import wire
from gateway.sim.answer import Answer, Choice
from gateway.sim.asked import CHAT, COMPLETIONS, MESSAGES, RESPONSES

DONE = b"data: [DONE]\n\n"


class Encoder(Protocol):
    """What a stream needs to know of its API. Each bytes object returned is one event."""

    def head(self) -> list[bytes]:
        """Return the events sent before any token exists."""
        ...

    def first(self) -> list[bytes]:
        """Return the events that precede the first token."""
        ...

    def delta(self, choice: Choice, *, last: bool) -> list[bytes]:
        """Return the events for a choice's unsent tokens; `last` = it is finished."""
        ...

    def tail(self) -> list[bytes]:
        """Return the events after every choice finished."""
        ...


def encoder(answer: Answer) -> Encoder:
    """Return the encoder of the answer's API."""
    kinds: dict[str, Any] = {
        CHAT: _ChatEncoder,
        COMPLETIONS: _CompletionEncoder,
        MESSAGES: _MessageEncoder,
        RESPONSES: _ResponseEncoder,
    }
    made: Encoder = kinds[answer.asked.api](answer)
    return made


def _data(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _named(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


class _OpenAi:
    """What chat and completions share: the usage chunk and the end."""

    object = ""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._base = {
            "id": answer.id,
            "object": self.object,
            "created": answer.created,
            "model": answer.asked.model,
        }

    def head(self) -> list[bytes]:
        return []

    def running_usage(self, choice: Choice | None) -> dict[str, Any]:
        """Return the `usage` of a chunk under `continuous_usage_stats`, else nothing."""
        asked = self.answer.asked
        if not (asked.usage and asked.continuous):
            return {}
        prompt, done = self.answer.prompt_tokens, choice.produced if choice else 0
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done}
        return {"usage": counts | {"completion_tokens_details": None}}

    def fingerprint(self, *, last: bool) -> dict[str, Any]:
        """Return the fingerprint for the last choice's last chunk, when no usage chunk follows."""
        answer = self.answer
        over = all(choice.sent >= choice.job.output_tokens for choice in answer.choices)
        if last and over and not answer.asked.usage:
            return {"system_fingerprint": wire.FINGERPRINT}
        return {}

    def tail(self) -> list[bytes]:
        answer = self.answer
        if not answer.asked.usage:
            return [DONE]
        counts = wire.usage(answer)
        details = counts.pop("prompt_tokens_details")
        del counts["completion_tokens_details"], details["multimodal_tokens"]
        if details["created_cache_tokens"] is None:
            del details["created_cache_tokens"]
        counts["prompt_tokens_details"] = details
        end = {"choices": [], "usage": counts, "system_fingerprint": wire.FINGERPRINT}
        return [_data(self._base | end), DONE]


class _ChatEncoder(_OpenAi):
    """`chat.completion.chunk` events. Plain chunks are spliced: they are nearly all of a stream."""

    object = "chat.completion.chunk"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._open = b"data: " + orjson.dumps(self._base)[:-1] + b',"choices":[{"index":'
        self._plain = not (answer.asked.usage and answer.asked.continuous)

    def first(self) -> list[bytes]:
        return [self._role(choice) for choice in self.answer.choices]

    def _role(self, choice: Choice) -> bytes:
        row = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        end = {"prompt_token_ids": None, "prompt_text": None}
        return _data(self._base | {"choices": [row]} | self.running_usage(None) | end)

    def delta(self, choice: Choice, *, last: bool) -> list[bytes]:
        text = choice.unsent()
        if self._plain and not last:
            return [
                b'%b%d,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null,'
                b'"token_ids":null}]}\n\n' % (self._open, choice.index, text.encode())
            ]
        row: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": text},
            "logprobs": None,
            "finish_reason": choice.finish if last else None,
        }
        if last:
            row["stop_reason"] = choice.stop_reason
        row["token_ids"] = None
        end = self.fingerprint(last=last)
        return [_data(self._base | {"choices": [row]} | self.running_usage(choice) | end)]


class _CompletionEncoder(_OpenAi):
    """`text_completion` events."""

    object = "text_completion"

    def first(self) -> list[bytes]:
        return []

    def delta(self, choice: Choice, *, last: bool) -> list[bytes]:
        echo = "" if choice.sent else self.answer.echo(choice)
        row = {
            "index": choice.index,
            "text": echo + choice.unsent(),
            "logprobs": None,
            "finish_reason": choice.finish if last else None,
            "stop_reason": choice.stop_reason if last else None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        end = self.fingerprint(last=last)
        return [_data(self._base | {"choices": [row]} | self.running_usage(choice) | end)]


class _MessageEncoder:
    """Anthropic's named events."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def head(self) -> list[bytes]:
        return []

    def first(self) -> list[bytes]:
        answer = self.answer
        start: dict[str, Any] = {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": answer.asked.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0},
        }
        block = {"type": "text", "text": ""}
        return [
            self._event("message_start", {"message": start}),
            self._event("content_block_start", {"content_block": block, "index": 0}),
        ]

    def delta(self, choice: Choice, *, last: bool) -> list[bytes]:
        del last
        text = {"type": "text_delta", "text": choice.unsent()}
        return [self._event("content_block_delta", {"delta": text, "index": 0})]

    def tail(self) -> list[bytes]:
        choice = self.answer.choices[0]
        delta = {
            "stop_reason": wire.message_stop_reason(choice),
            "stop_sequence": choice.stop_reason,
        }
        used = wire.message_usage(self.answer)
        return [
            self._event("content_block_stop", {"index": 0}),
            self._event("message_delta", {"delta": delta, "usage": used}),
            self._event("message_stop", {}),
        ]

    @staticmethod
    def _event(name: str, value: dict[str, Any]) -> bytes:
        return _named(name, {"type": name} | value)


class _ResponseEncoder:
    """OpenAI Responses' named, numbered events."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._number = 0
        self._item = wire.item_id(answer)

    def head(self) -> list[bytes]:
        made = wire.response(self.answer, [], "in_progress", None)
        return [
            self._event("response.created", {"response": made}),
            self._event("response.in_progress", {"response": made}),
        ]

    def first(self) -> list[bytes]:
        item = wire.output_item(self.answer, [], "in_progress")
        part = {"part": wire.output_part("", [])}
        return [
            self._event("response.output_item.added", {"item": item, "output_index": 0}),
            self._event("response.content_part.added", self._place() | part),
        ]

    def delta(self, choice: Choice, *, last: bool) -> list[bytes]:
        del last
        fields = {
            "content_index": 0,
            "delta": choice.unsent(),
            "item_id": self._item,
            "logprobs": [],
            "output_index": 0,
        }
        return [self._event("response.output_text.delta", fields)]

    def tail(self) -> list[bytes]:
        text = self.answer.choices[0].full_text
        done = {
            "content_index": 0,
            "item_id": self._item,
            "logprobs": [],
            "output_index": 0,
        }
        part = wire.output_part(text)
        item = wire.output_item(self.answer, [part], "completed")
        made = wire.finished_response(self.answer)
        return [
            self._event("response.output_text.done", done, {"text": text}),
            self._event("response.content_part.done", self._place() | {"part": part}),
            self._event("response.output_item.done", {"item": item, "output_index": 0}),
            self._event("response.completed", {"response": made}),
        ]

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item, "output_index": 0}

    def _event(self, name: str, value: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        numbered = value | {"sequence_number": self._number} | (more or {}) | {"type": name}
        self._number += 1
        return _named(name, numbered)
