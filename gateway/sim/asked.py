"""What a request asks of a simulated replica: bodies of every generating API, checked as vLLM does.

Bytes in, `Asked` out, or a `Fault`. Reads only what changes the answer; never waits.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.sim import faults, tokens

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


@dataclass(slots=True, frozen=True)
class Limits:
    """What the replica serves and up to which length."""

    model: str
    max_model_len: int


@dataclass(slots=True, frozen=True)
class Asked:
    """One checked request. `prompts` are packed tokens, each answered `n` times."""

    api: str
    model: str
    prompts: tuple[bytes, ...]
    max_tokens: int | None
    n: int = 1
    stream: bool = False
    usage: bool = False
    continuous: bool = False
    echo: bool = False
    stop: tuple[str, ...] = ()
    salt: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def parse_body(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the body's JSON object.

    Raises:
        Fault: it is empty, no JSON, no object, or not declared as JSON.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise faults.media_type()
    if not body:
        raise faults.invalid("missing", "body", "Field required", "None")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where, ctx = f"body.{error.pos}", f", 'ctx': {{'error': '{error.msg}'}}"
        raise faults.invalid(
            "json_invalid", where, "JSON decode error", "<dict of 0 items>", ctx
        ) from None
    if not isinstance(data, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        kind = type(data).__name__
        given = f"<{kind} of {len(data)} items>" if isinstance(data, list) else str(data)
        raise faults.invalid("model_attributes_type", "body", text, given)
    return data


def parse(api: str, data: dict[str, Any], limits: Limits) -> Asked:
    """Return what a generating request asks for.

    Raises:
        Fault: vLLM would refuse it.
    """
    required = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input", MESSAGES: "messages"}
    if data.get(required[api]) is None:
        raise faults.missing(required[api], len(data))
    stream = bool(data.get("stream"))
    options = data.get("stream_options") or {}
    _check_numbers(data)
    if data.get("stream_options") is not None and not stream:
        raise faults.bad_value(
            "Stream options can only be defined when `stream=True`.", "stream_options"
        )
    model = check_model(data, limits)
    asked = Asked(
        api=api,
        model=model,
        prompts=_prompts(api, data),
        max_tokens=_max_tokens(api, data, limits),
        n=_choices(api, data),
        stream=stream,
        usage=bool(options.get("include_usage")),
        continuous=bool(options.get("continuous_usage_stats")),
        echo=bool(data.get("echo")) and api == COMPLETIONS,
        stop=_stops(data),
        salt=str(data.get("cache_salt") or ""),
        data=data,
    )
    _check_lengths(asked, limits)
    return asked


def check_model(data: dict[str, Any], limits: Limits) -> str:
    """Return the served model; an absent one means the served one.

    Raises:
        Fault: another model is asked for.
    """
    model = data.get("model") or limits.model
    if model != limits.model:
        raise faults.no_model(str(model), limits.model)
    return limits.model


def conversation(api: str, data: dict[str, Any]) -> bytes:
    """Return the packed prompt of a body with messages (chat, messages) or input (responses).

    Raises:
        Fault: `messages` is no list, or empty.
    """
    if api == RESPONSES:
        given = data["input"]
        turns = given if isinstance(given, list) else [given]
        return tokens.render(turns, tools=data.get("tools"), system=data.get("instructions"))
    messages = data.get("messages")
    if not isinstance(messages, list):
        text = "Input should be a valid list"
        raise faults.invalid("list_type", "body.messages", text, str(messages)[:40])
    if not messages:
        raise faults.bad_value(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    return tokens.render(messages, tools=data.get("tools"), system=data.get("system"))


def _prompts(api: str, data: dict[str, Any]) -> tuple[bytes, ...]:
    if api != COMPLETIONS:
        return (conversation(api, data),)
    prompt = data["prompt"]
    if isinstance(prompt, str):
        return (tokens.encode(prompt),)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) for item in prompt):
            return (tokens.pack(prompt),)
        if all(isinstance(item, str) for item in prompt):
            return tuple(tokens.encode(item) for item in prompt)
        if all(isinstance(item, list) and item for item in prompt):
            return tuple(tokens.pack(item) for item in prompt)
    raise faults.bad_value("Either prompt or prompt_embeds must be provided and non-empty.")


def _check_numbers(data: dict[str, Any]) -> None:
    """Check temperature's kind and range: the one sampling value whose refusal clients meet."""
    temperature = data.get("temperature")
    if temperature is None:
        return
    try:
        value = float(temperature)
    except (TypeError, ValueError):
        text = "Input should be a valid number, unable to parse string as a number"
        raise faults.invalid("float_parsing", "body.temperature", text, temperature) from None
    if value < 0:
        raise faults.bad_value(
            f"temperature must be non-negative, got {value}.", "temperature", value
        )


def _choices(api: str, data: dict[str, Any]) -> int:
    n = data.get("n") if api in (CHAT, COMPLETIONS) else None
    if n is None:
        return 1
    if not isinstance(n, int) or n < 1:
        raise faults.bad_value(f"n must be at least 1, got {n}.", "n", n)
    if n > 1 and data.get("temperature") == 0:
        raise faults.bad_value(f"n must be 1 when using greedy sampling, got {n}.")
    return n


def _max_tokens(api: str, data: dict[str, Any], limits: Limits) -> int | None:
    name = "max_output_tokens" if api == RESPONSES else "max_tokens"
    if api == CHAT and data.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
    value = data.get(name)
    if value is None:
        return 16 if api == COMPLETIONS else None  # the completions default of OpenAI and vLLM
    if not isinstance(value, int):
        text = "Input should be a valid integer, unable to parse string as an integer"
        raise faults.invalid("int_parsing", f"body.{name}", text, str(value))
    if value < 1:
        raise faults.bad_value(f"max_tokens must be at least 1, got {value}.", "max_tokens", value)
    if value > limits.max_model_len:
        raise faults.bad_value(
            f"max_tokens={value} cannot be greater than max_model_len={limits.max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
            value,
        )
    return value


def _stops(data: dict[str, Any]) -> tuple[str, ...]:
    stop = data.get("stop") or data.get("stop_sequences") or ()
    if isinstance(stop, str):
        return (stop,)
    return tuple(item for item in stop if isinstance(item, str) and item)


def _check_lengths(asked: Asked, limits: Limits) -> None:
    for prompt in asked.prompts:
        count = tokens.count(prompt)
        if not count:
            raise faults.bad_value("The decoder prompt cannot be empty")
        if count >= limits.max_model_len:
            raise faults.too_long(limits.max_model_len)
        if asked.max_tokens and count + asked.max_tokens > limits.max_model_len:
            raise faults.too_long_with_output(limits.max_model_len, count, asked.max_tokens)
