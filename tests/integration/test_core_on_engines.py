"""The deciding core over simulated engines in virtual time: what it is for, and that it is honest.

No sockets, no clock: events in a heap. Asserts ratios and conservation, never a speed of ours.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from statistics import mean

import pytest

from gateway.core.dispatcher import Dispatcher
from gateway.core.settings import BackendSpec, ClassSpec, CoreSettings, ModelSpec, RoutingSpec
from gateway.core.types import Chain, Finish, Outcome, Query, Snapshot, Ticket, Usage
from gateway.sim.engine import Engine, Job
from gateway.sim.profiles import H100_8B, L4_8B, Profile

BLOCK = 16
Arrivals = Iterator[tuple[float, list[int], int]]


@dataclass
class Run:
    """One run's requests: times from arrival to first token, hits, where they went."""

    core: Dispatcher
    ttfts: list[float] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float:
        return self.cached / self.prompt


class Cluster:
    """Engines behind one dispatcher; `poll` seconds between snapshots, None = no metrics at all."""

    def __init__(self, profiles: list[Profile], policy: str, poll: float | None) -> None:
        names = [f"b{index}" for index in range(len(profiles))]
        settings = CoreSettings(
            models=(ModelSpec("m", tuple(names)),),
            backends=tuple(BackendSpec(name) for name in names),
            classes=(ClassSpec("chat", default=True),),
            routing=RoutingSpec(policy=policy),
        )
        self.run = Run(Dispatcher(settings, Random(1), 0.0))
        self.engines = {n: Engine(p) for n, p in zip(names, profiles, strict=True)}
        self._poll = poll
        self._tickets: dict[str, Ticket] = {}
        self.most_others = 0

    def serve(self, arrivals: Arrivals) -> Run:
        """Send everything that arrives, let every answer end, and return what happened."""
        events: list[tuple[float, int, str]] = []
        polled = 0.0
        for count, (now, blocks, output) in enumerate(arrivals):
            while events and events[0][0] <= now:
                at, _, name = heappop(events)
                self._collect(name, at)
                self._expect(events, name)
            if self._poll is not None and now >= polled + self._poll:
                polled = now
                self._scrape(now)
            name = self._send(str(count), blocks, output, now)
            self._expect(events, name)
        while events:
            at, _, name = heappop(events)
            self._collect(name, at)
            self._expect(events, name)
        return self.run

    def _expect(self, events: list[tuple[float, int, str]], name: str) -> None:
        at = self.engines[name].next_change_at()
        if at is not None and (at, 0, name) not in events:
            heappush(events, (at, 0, name))

    def _send(self, ident: str, blocks: list[int], output: int, now: float) -> str:
        chain = Chain(array("Q", blocks), float(BLOCK), len(blocks) * BLOCK + 5, True)
        ticket = self.run.core.admit(Query("m", "chat", chain, output), now)
        assert isinstance(ticket, Ticket)
        self._tickets[ident] = ticket
        self.run.sent[ticket.backend] = self.run.sent.get(ticket.backend, 0) + 1
        self._collect(ticket.backend, now)
        self.engines[ticket.backend].submit(Job(ident, chain.tokens, output, blocks), now)
        return ticket.backend

    def _collect(self, name: str, now: float) -> None:
        core, run = self.run.core, self.run
        for progress in self.engines[name].advance(now):
            job = progress.job
            ticket = self._tickets.get(job.id)
            if ticket is None:
                continue  # another gateway's
            assert job.first_token_at is not None
            if ticket.first_token_at is None:
                core.first_token(ticket, max(now, job.first_token_at))
            if progress.finished:
                run.ttfts.append(job.first_token_at - ticket.admitted_at)
                run.cached += job.cached_tokens
                run.prompt += job.prompt_tokens
                usage = Usage(job.prompt_tokens, job.output_tokens, job.cached_tokens)
                end = Finish(Outcome.OK, True, usage, job.output_tokens, job.last_token_at)
                core.finish(ticket, end, now)

    def _scrape(self, now: float) -> None:
        for name, engine in self.engines.items():
            self._collect(name, now)
            seen = Snapshot(
                at=now,
                running=engine.running,
                waiting=engine.waiting,
                kv_utilization=engine.kv_utilization,
                kv_capacity_tokens=engine.profile.engine.kv_tokens,
            )
            self.run.core.observe(name, seen, now)
            others = self.run.core._fleet.by_name[name].other_in_flight
            self.most_others = max(self.most_others, others)


def arrivals(count: int, rate: float, prompt: Callable[[Random], list[int]]) -> Arrivals:
    rng = Random(7)
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        yield now, prompt(rng), 100


def blocks(seed: str, tokens: int) -> list[int]:
    rng = Random(seed)
    return [rng.getrandbits(64) for _ in range(tokens // BLOCK)]


GROUPS = [blocks(f"group{index}", 6000) for index in range(40)]
DOCUMENT = blocks("document", 12_000)


def grouped(rng: Random) -> list[int]:
    return rng.choice(GROUPS) + [rng.getrandbits(64) for _ in range(75)]


def common(rng: Random) -> list[int]:
    return DOCUMENT + [rng.getrandbits(64) for _ in range(8)]


def unique(rng: Random) -> list[int]:
    return [rng.getrandbits(64) for _ in range(rng.randrange(20, 300))]


def serve(
    policy: str, traffic: Arrivals, profiles: list[Profile] | None = None, poll: float | None = 0.25
) -> Run:
    return Cluster(profiles or [H100_8B] * 4, policy, poll).serve(traffic)


def test_shared_prefixes_are_found_and_answers_start_sooner_than_by_round_robin() -> None:
    ours = serve("cost", arrivals(500, 10, grouped))
    theirs = serve("round_robin", arrivals(500, 10, grouped))
    assert ours.hit_ratio > theirs.hit_ratio + 0.1
    assert mean(ours.ttfts) < 0.75 * mean(theirs.ttfts)


def test_unique_prompts_start_sooner_than_by_round_robin() -> None:
    ours = serve("cost", arrivals(600, 30, unique))
    theirs = serve("round_robin", arrivals(600, 30, unique))
    assert mean(ours.ttfts) < mean(theirs.ttfts)


def test_one_document_for_all_is_served_by_all() -> None:
    ours = serve("cost", arrivals(600, 40, common))
    assert max(ours.sent.values()) <= 1.3 * 600 / 4
    assert ours.hit_ratio > 0.95


@pytest.mark.parametrize("policy", ["cost", "lmetric", "weights", "random"])
def test_predicted_hits_are_the_engines_hits(policy: str) -> None:
    run = serve(policy, arrivals(400, 10, grouped))
    shown = run.core.backends(1e6)
    predicted = sum(b.hit_tokens_predicted for b in shown)
    reported = sum(b.hit_tokens_reported for b in shown)
    assert reported == run.cached
    assert predicted == pytest.approx(reported, rel=0.05)


@pytest.mark.parametrize("rate", [2, 40])
def test_load_is_not_taken_for_slow_hardware(rate: float) -> None:
    run = serve("cost", arrivals(600, rate, grouped))
    for shown in run.core.backends(1e6):
        assert 0.6 < shown.prefill_tokens_per_s * 30e-6 < 1.5


def test_slower_hardware_is_found_out_and_gets_less() -> None:
    run = serve("cost", arrivals(600, 6, unique), [H100_8B, H100_8B, H100_8B, L4_8B])
    speed = {b.name: b.prefill_tokens_per_s for b in run.core.backends(1e6)}
    assert speed["b3"] < speed["b0"] / 3
    assert run.sent["b3"] < 0.5 * mean(run.sent[name] for name in ("b0", "b1", "b2"))


def test_without_any_metrics_it_does_as_well() -> None:
    with_metrics = serve("cost", arrivals(400, 10, grouped))
    without = serve("cost", arrivals(400, 10, grouped), poll=None)
    assert mean(without.ttfts) < 1.1 * mean(with_metrics.ttfts)


def test_our_own_load_is_not_taken_for_others() -> None:
    cluster = Cluster([H100_8B] * 4, "cost", 0.05)
    cluster.serve(arrivals(300, 30, unique))
    assert cluster.most_others == 0


def test_what_another_gateway_sends_keeps_ours_away() -> None:
    cluster = Cluster([H100_8B] * 4, "cost", 0.05)
    for index in range(60):
        prompt = blocks(f"theirs{index}", 1600)
        cluster.engines["b0"].submit(Job(f"theirs{index}", 1600, 5000, prompt), 0.0)
    run = cluster.serve(arrivals(200, 20, unique))
    assert cluster.most_others == 60
    assert run.sent.get("b0", 0) < 0.5 * run.sent["b1"]


def test_afterwards_nothing_is_owed() -> None:
    run = serve("cost", arrivals(300, 40, grouped))
    assert len(run.ttfts) == 300
    for shown in run.core.backends(1e6):
        assert (shown.in_flight, shown.owed_prefill_s, shown.context_tokens) == (0, 0.0, 0)
