"""The values that cross the core's boundary. Data only: no behaviour beyond derived properties.

Units are in the names (`_s` seconds, `_tokens`, `_blocks`). `now` is always monotonic seconds.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, unique
from typing import Any, NewType

import msgspec

BackendId = NewType("BackendId", int)
"""Slot of a backend in the dispatcher: the bit it owns in the trie's masks. Reused only after drop."""

BlockHash = NewType("BlockHash", int)
"""Unsigned 64-bit hash of a block chained with everything before it."""


@unique
class Api(Enum):
    """The request shapes the data listener accepts; the value is the canonical upstream path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    RERANK_V1 = "/v1/rerank"
    RERANK = "/rerank"
    SCORE_V1 = "/v1/score"
    SCORE = "/score"
    POOLING = "/pooling"
    CLASSIFY = "/classify"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    TRANSCRIPTIONS = "/v1/audio/transcriptions"
    TRANSLATIONS = "/v1/audio/translations"

    # Enum's own hashes the name in Python code: 0.2 us per table look-up, dozens per request.
    __hash__ = object.__hash__


@unique
class Outcome(StrEnum):
    """How a request ended: metric label, log field and statistic alike (contract, section 5)."""

    OK = "ok"
    CLIENT_CLOSED = "client_closed"
    BAD_REQUEST = "bad_request"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    REJECTED_RATE = "rejected_rate"
    REJECTED_FULL = "rejected_full"
    EXPIRED = "expired"
    NO_BACKEND = "no_backend"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TRUNCATED = "upstream_truncated"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_4XX = "upstream_4xx"
    UPSTREAM_5XX = "upstream_5xx"
    INTERNAL_ERROR = "internal_error"

    __hash__ = str.__hash__  # as Api's


class Chain(msgspec.Struct, frozen=True, gc=False):
    """A prompt as chained block hashes.

    `hashes[i]` covers blocks 0..i, full blocks only. `tokens` is the whole prompt's token count,
    the unhashed tail included; `exact` says whether it was counted or estimated from bytes.
    `text_bytes` is the canonical prompt's length, what a bytes-per-token ratio is learnt from.
    Blocks after the first `narrow_blocks` hold twice `tokens_per_block` (see core/chain.py).
    Where the chain can go on: `tail` is the unhashed end, `link` the hash before it, `block_bytes`
    the size of a block; 0 = it cannot.
    """

    hashes: "array[int]"
    tokens_per_block: float
    tokens: int
    exact: bool = False
    text_bytes: int = 0
    narrow_blocks: int = 1 << 62
    tail: bytes = b""
    link: int = 0
    block_bytes: int = 0

    def hit_tokens(self, depth: int) -> int:
        """Return the tokens covered by the first `depth` blocks, at most `tokens`."""
        if depth > self.narrow_blocks:
            depth += depth - self.narrow_blocks
        covered = int(depth * self.tokens_per_block)
        tokens = self.tokens
        return covered if covered < tokens else tokens  # noqa: FURB136 - twice as fast


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts an engine reported; None = it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(slots=True, frozen=True)
class Snapshot:
    """What one scrape of a backend's `/metrics` said, taken at `at` (monotonic seconds).

    None = the engine does not export it. `kv_utilization` is 0..1; counters are since engine start.
    """

    at: float
    running: int = 0
    waiting: int = 0
    kv_utilization: float | None = None
    kv_capacity_tokens: int | None = None
    block_tokens: int | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    start_time: float | None = None


class Query(msgspec.Struct, frozen=True, gc=False):
    """One request as the dispatcher sees it: everything a decision needs and nothing else.

    `stream` False = the answer comes whole, so its first byte says nothing about the prefill.
    `prefills` False = the engine only counts or spells tokens: its cache learns nothing of `chain`.
    `body_bytes` is what a waiting request keeps; `patience_s` how long its client says it waits.
    """

    model: str
    cls: str
    chain: Chain
    expected_output_tokens: int
    session: str | None = None
    class_rule: str = "default"
    key: str | None = None
    stream: bool = True
    prefills: bool = True
    body_bytes: int = 0
    patience_s: float | None = None


TrailRow = tuple[str, int, int, int, float, float, tuple[float, ...]]
"""A candidate as a decision saw it: name, hit and uncached tokens, in flight, owed_s, cost, terms."""


class Ticket(msgspec.Struct, gc=False):
    """An admitted request's place in the books, from `admit` until `finish`.

    The dispatcher owns and mutates it; callers read `backend` (the configured name) and the
    predicted hit, and hand it back. `last_use` is when the backend last used the last of the
    `known_blocks`, and how many of them then, where they are worth learning from. `tried` are the
    slots whose attempts failed; `owes` = its prefill is still on the backend's books; `held` = it
    waits at the gateway, and `backend` may yet change; `counted` = it is on the queue's books of
    what was sent; `stream_of` = the limited key whose stream it is; `visit` undoes the prefix
    index's belief; `trail` is the decision's candidates until `remember` or the end. No cycle leads
    through a ticket, so the garbage collector need not look at it.
    """

    id: int
    query: Query
    slot: BackendId
    backend: str
    policy: str
    hit_tokens: int
    uncached_tokens: int
    prefill_s: float
    admitted_at: float
    dispatched_at: float
    reason: str = ""
    reserved_tokens: float = 0.0
    known_blocks: int = 0
    last_use: tuple[float, int] | None = None
    first_token_at: float | None = None
    attempts: int = 1
    tried: tuple[BackendId, ...] = ()
    finished: bool = False
    owes: bool = False
    held: bool = False
    counted: bool = False
    stream_of: str | None = None
    visit: Any = None
    trail: Sequence[TrailRow] = ()


@unique
class RefusalKind(Enum):
    """Why `admit` said no."""

    RATE = "rate"
    FULL = "full"
    EXPIRED = "expired"
    QUOTA = "quota"
    NO_BACKEND = "no_backend"
    UNKNOWN_MODEL = "unknown_model"


@dataclass(slots=True, frozen=True)
class Refusal:
    """An honest no: `retry_after_s` is when the refused request could pass, before jitter."""

    kind: RefusalKind
    retry_after_s: float
    detail: str


class Finish(msgspec.Struct, frozen=True, gc=False):
    """How a ticket ended, as far as learning and settlement care.

    `prefilled` = the backend surely began the prefill (an answer head or a byte came), so the
    prompt's blocks may be believed resident. `chunks` approximates completion tokens when `usage`
    says nothing. `last_token_at` is the time of the last content chunk. `sent` False = the backend
    it was on last surely got none of it.
    """

    outcome: Outcome
    prefilled: bool
    usage: Usage = Usage()
    chunks: int = 0
    last_token_at: float | None = None
    sent: bool = True


@dataclass(slots=True, frozen=True)
class BackendScore:
    """One backend's row in an explanation.

    `index` says where the hit comes from: "exact", what the engine tells it holds, or
    "approximate", what was sent to it; None = no longer known. `indexed_tokens` is the hit before
    any distrust, `depth_blocks` its blocks, `why_hit` in words why it is believed to be that long.
    """

    name: str
    eligible: bool
    why_not: str | None
    hit_tokens: int
    uncached_tokens: int
    in_flight: int
    owed_prefill_s: float
    cost_s: float | None
    terms: dict[str, float]
    index: str | None = None
    depth_blocks: int = 0
    indexed_tokens: int = 0
    why_hit: str | None = None


@dataclass(slots=True, frozen=True)
class HotPrefix:
    """A prefix that many recent requests share: `prefix` is the hash of its last block, in hex.

    `depth_blocks` and `homes`, the backends believed to hold it, are as the last such request
    found them; `request_ratio` is its share of the model's recent requests.
    """

    model: str
    prefix: str
    depth_blocks: int
    request_ratio: float
    homes: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Explanation:
    """What would happen (or happened) to a request, and why (contract, section 8)."""

    cls: str
    class_rule: str
    prompt_tokens: int
    prompt_tokens_exact: bool
    policy: str
    winner: str | None
    reason: str
    backends: list[BackendScore]


@dataclass(slots=True, frozen=True)
class Decided:
    """A remembered decision in one line: who won, when it was sent, and what it was believed to hit."""

    request_id: str
    cls: str
    backend: str
    hit_tokens: int
    prompt_tokens: int
    dispatched_at: float


@dataclass(slots=True, frozen=True)
class EventStatus:
    """What a backend's KV events have come to; `mode` "off" = none are followed.

    `exact` = the index holds what the engine says it holds, `approximate` = what was sent and
    answered. `losses` are gaps no replay filled, each of which forgot all; `blocks` the engine's.
    """

    mode: str = "off"
    events: int = 0
    gaps: int = 0
    losses: int = 0
    restarts: int = 0
    unreadable: int = 0
    unknown_blocks: int = 0
    blocks: int = 0


@dataclass(slots=True, frozen=True)
class BackendStatus:
    """A backend's live figures for `/status` and the metrics (contract, section 8).

    `index_capacity_blocks` is what its index may hold, `index_capacity_ratio` that as a share of the
    cache the engine claims, learnt; `prefix_trust_ratio` scales indexed hits, and
    `prefix_error_ratio` is how far recent predictions were off in sum (None = no hits yet).
    `saturation`: 1 = the next request waits (`core/saturation.py`); `waiting` requests are held for
    it; `owed_limit_s` is W now, and why; `breaker` is closed, half_open or open (`core/breaker.py`), and
    `warming` = it came up a few seconds ago and gets requests little by little (`core/warm.py`).
    `saved_prefill_s`: what hits saved against computing every prompt whole, believed hits where the
    engine reports none.
    """

    name: str
    up: bool
    draining: bool
    in_flight: int
    in_flight_prefill_tokens: int
    owed_prefill_s: float
    context_tokens: int
    kv_utilization: float | None
    queue_depth: int
    running: int
    snapshot_age_s: float | None
    prefill_tokens_per_s: float
    index_blocks: int
    hit_tokens_predicted: int
    hit_tokens_reported: int
    kv_events: EventStatus = EventStatus()
    index_capacity_blocks: int = 0
    index_capacity_ratio: float = 1.0
    prefix_trust_ratio: float = 1.0
    prefix_error_ratio: float | None = None
    saturation: float = 0.0
    waiting: int = 0
    owed_limit_s: float = 0.0
    owed_limit_reason: str = ""
    breaker: str = "closed"
    saved_prefill_s: float = 0.0
    breaker_opens: int = 0
    warming: bool = False


@dataclass(slots=True, frozen=True)
class ClassStatus:
    """A class's live figures. `bucket_tokens` is None for an unlimited class."""

    name: str
    waiting: int
    waiting_bytes: int
    bucket_tokens: float | None
    admitted: int
    rejected: int
