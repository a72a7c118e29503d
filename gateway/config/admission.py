"""The keys of admission: traffic classes, API keys, the queue, the usage log.

A part of the schema (see `schema.py`), in a file of its own for its length.
"""

from typing import Annotated

import msgspec

from gateway.config.keys import Key


class _Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A mapping of the YAML file."""


class MatchConfig(_Section, frozen=True):
    """One rule of a class: every condition given must hold."""

    path: Annotated[
        str | None, Key("Request path, exactly.", form="path", example="/v1/messages")
    ] = None
    tools: Annotated[bool | None, Key("Whether the request carries tools.")] = None
    suffix: Annotated[
        bool | None, Key("Whether it asks for a text before a suffix (fill in the middle).")
    ] = None
    min_prompt_tokens: Annotated[
        int | None, Key("Smallest prompt that matches.", unit="tokens", ge=0)
    ] = None
    max_prompt_tokens: Annotated[
        int | None, Key("Largest prompt that matches.", unit="tokens", ge=0)
    ] = None
    user_agent: Annotated[
        str | None,
        Key("Glob over the User-Agent header in any case, e.g. claude-cli*.", form="text"),
    ] = None
    key: Annotated[str | None, Key("Name of an entry of keys.", form="name")] = None
    model: Annotated[str | None, Key("Glob over the model id.", form="text")] = None


class BucketConfig(_Section, frozen=True):
    """Token bucket of a class, in LLM tokens (uncached prompt plus expected output)."""

    tokens_per_second: Annotated[
        float, Key("Refill rate.", unit="tokens/s", gt=0, le=1e12, example=30_000.0)
    ]
    burst_tokens: Annotated[
        float,
        Key("Size: what may be spent at once.", unit="tokens", gt=0, le=1e12, example=120_000.0),
    ]
    borrow: Annotated[
        bool,
        Key("Take in what other classes' full buckets have no room for; it costs them nothing."),
    ] = False


class SloConfig(_Section, frozen=True):
    """Targets a class is judged by; the cost policy guards the second."""

    ttft_s: Annotated[float, Key("Time to first token.", unit="s", gt=0, le=86_400)] = 5.0
    tpot_s: Annotated[float, Key("Time per output token.", unit="s", gt=0, le=3_600)] = 0.1


class ClassConfig(_Section, frozen=True):
    """A traffic class. Rules of all classes are tried in file order; the first match wins."""

    match: Annotated[
        list[MatchConfig], Key("Rules, any of which puts a request into this class.")
    ] = []
    default: Annotated[
        bool, Key("Takes what no rule matched. Exactly one class; implied for a single one.")
    ] = False
    bucket: Annotated[BucketConfig | None, Key("Token bucket. None = unlimited.")] = None
    share: Annotated[
        float | None,
        Key("Guaranteed share of engine time. None = equal parts of the rest.", ge=0, le=1),
    ] = None
    max_wait_s: Annotated[
        float,
        Key(
            "Longest wait in the gateway's queue, and for a backend to come up.",
            unit="s",
            ge=0,
            le=3_600,
        ),
    ] = 5.0
    max_waiting: Annotated[
        int, Key("Most requests of the class that wait at once.", ge=0, le=1_000_000)
    ] = 10_000
    max_waiting_mib: Annotated[
        int, Key("Most body bytes that its waiting requests keep.", unit="MiB", ge=0, le=65_536)
    ] = 256
    kv_reserve: Annotated[
        float,
        Key("Part of each KV cache that overload of other classes leaves to it.", ge=0, le=0.5),
    ] = 0.15
    slo: Annotated[SloConfig, Key("Targets.")] = SloConfig()
    engine_priority: Annotated[
        int | None,
        Key(
            "Written into its bodies as `priority`, lower first, for engines that schedule by it "
            "(vLLM's --scheduling-policy priority; others refuse it). None = nothing is written.",
            ge=-1_000_000,
            le=1_000_000,
        ),
    ] = None


class KeyConfig(_Section, frozen=True):
    """An API key. Only its SHA-256 is kept: `radixgate key new NAME` prints both."""

    name: Annotated[str, Key("Name in logs and status.", form="name", example="team-a")]
    sha256: Annotated[
        str, Key("SHA-256 of the key, 64 hex digits.", form="sha256", example="0" * 64)
    ]
    class_: Annotated[
        str | None, Key("Class of its requests. None = by the rules.", form="name")
    ] = msgspec.field(default=None, name="class")
    choose_class: Annotated[bool, Key("Whether it may send x-gateway-class.")] = False
    choose_priority: Annotated[
        bool, Key("Whether its bodies may set `priority`; otherwise it becomes 0.")
    ] = False
    models: Annotated[list[str], Key("Globs of the model ids it may use.", form="text")] = (
        msgspec.field(default_factory=lambda: ["*"])
    )
    tokens_per_minute: Annotated[
        int | None,
        Key("Token limit: uncached prompt and answer. None = none.", unit="tokens/min", ge=1),
    ] = None
    requests_per_minute: Annotated[
        int | None, Key("Request limit. None = none.", unit="requests/min", ge=1)
    ] = None
    tokens_per_day: Annotated[
        int | None,
        Key("Hard quota; refused as not retryable. None = none.", unit="tokens/day", ge=1),
    ] = None
    streams: Annotated[
        int | None, Key("Requests at once; more of them wait. None = any number.", ge=1)
    ] = None
    expires: Annotated[
        str | None, Key("Last day it is valid (UTC, YYYY-MM-DD). None = for ever.", form="date")
    ] = None


class QueueConfig(_Section, frozen=True):
    """Requests held at the gateway while every engine has enough to do."""

    enabled: Annotated[bool, Key("Hold them. Off: everything is sent at once.")] = True
    owed_s: Annotated[
        float,
        Key(
            "Prefill seconds a backend may owe before the next request is held (W).",
            unit="s",
            ge=0,
            le=60,
        ),
    ] = 0.5
    adaptive: Annotated[
        bool,
        Key(
            "Find W per backend between 0.25 and 1 s, so that a quarter to half of slo.ttft_s is "
            "spent waiting inside the engine when requests wait at all. Off = owed_s."
        ),
    ] = False
    steal_s: Annotated[
        float,
        Key("A backend that owes less takes over what waits for another.", unit="s", ge=0, le=60),
    ] = 0.125
    kv_share: Annotated[
        float,
        Key("Part of the KV cache that requests may fill before others are held.", ge=0.1, le=1),
    ] = 0.97
    overload_kv_share: Annotated[
        float, Key("The same under overload, for a class of long prompts.", ge=0.1, le=1)
    ] = 0.7
    long_prompt_tokens: Annotated[
        int, Key("Mean prompt from which a class's prompts are long.", unit="tokens", ge=1)
    ] = 8_000


class UsageLogConfig(_Section, frozen=True):
    """One JSON line per request that reached a backend: who used how many tokens."""

    path: Annotated[
        str | None,
        Key("File that is appended to. None = off.", form="text"),
    ] = None
    max_mib: Annotated[
        int, Key("Size at which a new file is begun.", unit="MiB", ge=1, le=65_536)
    ] = 64
    files: Annotated[int, Key("Files kept, the one being written included.", ge=1, le=10_000)] = 16
    fsync_s: Annotated[
        float,
        Key("What is written is on the disk after this long at most.", unit="s", ge=0.1, le=3_600),
    ] = 1.0


_CODING_AGENTS = ("claude-cli*", "codex*", "cline*", "aider*", "continue*", "opencode*")

BUILTIN_CLASSES: dict[str, ClassConfig] = {
    "coding": ClassConfig(
        match=[
            MatchConfig(path="/v1/messages"),
            MatchConfig(tools=True),
            MatchConfig(min_prompt_tokens=8000),
            *(MatchConfig(user_agent=agent) for agent in _CODING_AGENTS),
        ],
        share=0.5,
        max_wait_s=30.0,
        slo=SloConfig(ttft_s=5.0, tpot_s=0.1),
    ),
    "chat": ClassConfig(
        default=True, share=0.5, max_wait_s=5.0, slo=SloConfig(ttft_s=1.0, tpot_s=0.05)
    ),
}
"""Used when `classes` is empty: coding agents with long prompts, and everything else."""
