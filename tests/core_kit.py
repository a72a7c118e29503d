"""Builders for tests of the core: small fleets, prompts as chains, endings."""

from array import array
from collections.abc import Iterable
from functools import lru_cache
from random import Random

from gateway.core.breaker import Breaker
from gateway.core.cost import Demand, refresh
from gateway.core.dispatcher import Dispatcher
from gateway.core.engine_model import EngineModel
from gateway.core.ledger import Account
from gateway.core.settings import (
    BackendSpec,
    ClassSpec,
    CoreSettings,
    EngineProfile,
    ModelSpec,
    RoutingSpec,
)
from gateway.core.types import BackendId, Chain, Finish, Outcome, Query, Ticket, Usage

TOKENS_PER_BLOCK = 64.0
CHAT = (ClassSpec("chat", default=True),)


def settings(
    backends: int | Iterable[str] = 8,
    *,
    policy: str = "cost",
    classes: tuple[ClassSpec, ...] = CHAT,
    profile: EngineProfile | None = None,
) -> CoreSettings:
    """One model `m` over the backends `b0`, `b1`, ... (or the names given)."""
    names = [f"b{i}" for i in range(backends)] if isinstance(backends, int) else list(backends)
    spec = profile or EngineProfile()
    return CoreSettings(
        models=(ModelSpec("m", tuple(names), aliases=("alias",)),),
        backends=tuple(BackendSpec(name, spec) for name in names),
        classes=classes,
        routing=RoutingSpec(policy=policy),
    )


def dispatcher(
    backends: int | Iterable[str] = 8,
    *,
    policy: str = "cost",
    classes: tuple[ClassSpec, ...] = CHAT,
    profile: EngineProfile | None = None,
    seed: int = 1,
) -> Dispatcher:
    chosen = settings(backends, policy=policy, classes=classes, profile=profile)
    return Dispatcher(chosen, Random(seed), 0.0)


def chain(*parts: tuple[str, int], tail: int = 0) -> Chain:
    """A prompt made of named parts, each so many tokens (rounded down to blocks).

    Equal leading parts give equal leading blocks; `tail` tokens at the end belong to no block.
    """
    hashes = array("Q")
    seed = ""
    for name, tokens in parts:
        seed += f"/{name}"
        hashes.extend(_blocks(seed, int(tokens / TOKENS_PER_BLOCK)))
    return Chain(hashes, TOKENS_PER_BLOCK, int(len(hashes) * TOKENS_PER_BLOCK) + tail)


@lru_cache(maxsize=1000)
def _blocks(seed: str, count: int) -> "array[int]":
    rng = Random(seed)
    return array("Q", [rng.getrandbits(64) for _ in range(count)])


def query(
    *parts: tuple[str, int],
    output: int = 250,
    cls: str = "chat",
    model: str = "m",
    tail: int = 10,
    stream: bool = True,
    prefills: bool = True,
) -> Query:
    made = chain(*parts, tail=tail)
    return Query(model, cls, made, output, stream=stream, prefills=prefills)


def admit(core: Dispatcher, wanted: Query, now: float) -> Ticket:
    ticket = core.admit(wanted, now)
    assert isinstance(ticket, Ticket)
    return ticket


def done(
    outcome: Outcome = Outcome.OK,
    *,
    prefilled: bool = True,
    usage: Usage | None = None,
    chunks: int = 10,
    at: float | None = None,
) -> Finish:
    return Finish(outcome, prefilled, usage or Usage(), chunks, at)


def serve(core: Dispatcher, wanted: Query, now: float, took: float = 0.1) -> Ticket:
    """One request from admission to its good end."""
    ticket = admit(core, wanted, now)
    core.first_token(ticket, now + took)
    core.finish(ticket, done(at=now + took), now + took)
    return ticket


def account(slot: int = 0, profile: EngineProfile | None = None) -> Account:
    """A lone backend's books, outside any fleet."""
    engine = EngineModel(profile or EngineProfile())
    row = Account(BackendId(slot), f"b{slot}", engine, Breaker(Random(slot)))
    refresh(row, 0.0)
    return row


def ticket_for(wanted: Query, row: Account, ident: int = 1, *, hit: int = 0) -> Ticket:
    uncached = max(1, wanted.chain.tokens - hit)
    return Ticket(
        id=ident,
        query=wanted,
        slot=row.slot,
        backend=row.name,
        policy="cost",
        hit_tokens=hit,
        uncached_tokens=uncached,
        prefill_s=row.engine.prefill_s(uncached, wanted.chain.tokens),
        admitted_at=0.0,
        dispatched_at=0.0,
    )


def demand(wanted: Query, now: float = 0.0) -> Demand:
    want = Demand()
    want.now = now
    want.chain = wanted.chain
    want.prompt_tokens = wanted.chain.tokens or 1
    want.output_tokens = wanted.expected_output_tokens
    return want


def books(core: Dispatcher, now: float = 1e6) -> list[tuple[int, int, float, int]]:
    """What every visible backend still has on its books."""
    return [
        (b.in_flight, b.in_flight_prefill_tokens, b.owed_prefill_s, b.context_tokens)
        for b in core.backends(now)
    ]
