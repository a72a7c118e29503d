"""Exact mode: the core behind simulated engines that tell what they cache, in virtual time."""

from array import array
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import msgspec

from gateway.core.chain import chain_tokens
from gateway.core.event_feed import Feed
from gateway.core.exactness import EventSpec
from gateway.core.types import Chain, EventStatus, Query, Ticket
from gateway.sim import tokens
from gateway.sim.engine import Engine, Job
from gateway.sim.journal import Journal
from tests.integration.convergence_rig import BLOCK, Ask, Bench, Replica, Seen, sized
from tests.kv_kit import SALT, chain

SPEC = EventSpec("m", SALT, BLOCK)


class Text(NamedTuple):
    """A prompt and its answer as packed tokens."""

    prompt: bytes
    answer: bytes
    at: float


class ExactBench(Bench):
    """Replicas whose events reach the core at each change of their batch. `losing` ones lose them.

    `shift` is added to every token id that the gateway sees: another tokenizer than the engine's.
    """

    shift = 0

    def __init__(self, count: int, kv_tokens: int, *, told: bool = True) -> None:
        self.journals: dict[str, Journal] = {}
        self.numbers: dict[str, int] = {}
        self.feeds: dict[str, Feed] = {}
        self.losing: set[str] = set()
        replicas = []
        for index in range(count):
            self.journals[f"b{index}"] = journal = Journal(BLOCK)
            replicas.append(Replica(Engine(sized(kv_tokens), journal=journal), kv_tokens))
        super().__init__(replicas, told=told)
        for name in self.replicas:
            feed = self.core.follow(name, SPEC)
            assert feed is not None
            self.feeds[name] = feed
            self.numbers[name] = 0
            feed.linked()
            feed.replay_ended()
            feed.step()

    def say(self, text: Text) -> None:
        """Send one request at its time."""
        self.until(text.at)
        self._asked += 1
        ident = str(self._asked)
        ids = text.prompt + text.answer
        prompt_tokens, output = tokens.count(text.prompt), tokens.count(text.answer)
        hashes = chain([ident + self.shift for ident in tokens.unpack(text.prompt)], BLOCK)
        asked = Chain(hashes, float(BLOCK), prompt_tokens, True)
        ticket = self.core.admit(Query("m", "chat", asked, output), self.now)
        assert isinstance(ticket, Ticket)
        self._live[ident] = ticket, Ask([], [], text.at)
        name = ticket.backend
        self._collect(name)
        job = Job(ident, prompt_tokens, output, tokens.chain(ids, BLOCK), ids)
        self.replicas[name].engine.submit(job, self.now)
        self._expect(name)

    def finish(self) -> list[Seen]:
        """Let everything end; what was seen."""
        while self._live:
            self.until(self._events[0][0])
        return self.seen

    def _collect(self, name: str) -> None:
        super()._collect(name)
        events = self.journals[name].take()
        if not events:
            return
        number = self.numbers[name]
        self.numbers[name] += 1
        if name in self.losing:
            return
        feed = self.feeds[name]
        feed.live(number, msgspec.msgpack.encode([self.now, events, 0]))
        while feed.step():
            pass

    def status(self, name: str) -> EventStatus:
        return next(row.kv_events for row in self.core.backends(self.now) if row.name == name)


def text(rng: Random, count: int) -> bytes:
    return rng.randbytes(count * tokens.TOKEN_BYTES)


def grouped(count: int, rate: float, output: int) -> Iterator[Text]:
    """150 groups of five users: 6,000 common and 1,200 own tokens each; Poisson arrivals."""
    rng = Random(5)
    groups = [text(rng, 6000) for _ in range(150)]
    own = [[text(rng, 1200) for _ in range(5)] for _ in range(150)]
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        group = rng.randrange(150)
        yield Text(groups[group] + rng.choice(own[group]), text(rng, output), now)


def shares(seen: list[Seen]) -> tuple[float, float]:
    """Predicted and reported hits as shares of the prompts."""
    prompt = sum(one.prompt for one in seen)
    return sum(o.predicted for o in seen) / prompt, sum(o.reported for o in seen) / prompt


class Pinned(ExactBench):
    """Routed by a policy that is not ours to tune, so that the traffic of each engine stays the same."""

    policy = "lmetric"


def test_hit_rate_under_cache_pressure_is_predicted_within_a_point() -> None:
    # all prompts are 1.8 M tokens, 73 % of what eight replicas hold; the answers come on top
    run = Pinned(8, 307_328)
    for one in grouped(2000, 20.0, 512):
        run.say(one)
    seen = run.finish()[600:]

    predicted, reported = shares(seen)
    assert 0.7 < reported < 0.99
    assert abs(predicted - reported) < 0.01
    off = sum(abs(one.predicted - one.reported) for one in seen) / sum(o.prompt for o in seen)
    assert off < 0.01  # request by request, not only in sum
    assert all(run.feeds[name].exact for name in run.replicas)
    # the simulated pool forgets a block while a private copy of it has children: next to never
    unknown = sum(run.status(name).unknown_blocks for name in run.replicas)
    assert unknown < 0.001 * sum(feed.holdings.stored for feed in run.feeds.values())


def test_one_small_cache_is_predicted_to_the_token_request_by_request() -> None:
    """Evictions behind our back and answers that are cached too are both told of."""
    run = ExactBench(1, 30_000, told=False)
    rng = Random(3)
    talks = [text(rng, 3000) for _ in range(14)]
    for number in range(300):
        index = rng.randrange(14)
        answer = text(rng, 64)
        run.say(Text(talks[index], answer, run.now + 2.0))
        talks[index] += answer + text(rng, 16)
        if len(talks[index]) > 6000 * 4:
            talks[index] = talks[index][: 3000 * 4]
        if number % 90 == 89:
            run.replicas["b0"].engine.reset_prefix_cache()
    seen = run.finish()

    assert [one.predicted for one in seen] == [one.reported for one in seen]
    assert 0.2 < shares(seen)[1] < 0.9


def test_a_burst_of_one_prompt_does_not_race_the_events() -> None:
    """Before its blocks are told of, a prompt's prefix counts as held where it was sent."""
    run = ExactBench(1, 307_328)
    run.losing.add("b0")  # the events are slower than the burst
    rng = Random(1)
    head = text(rng, 8000)
    run.say(Text(head + text(rng, 100), text(rng, 16), 1.0))
    for number in range(5):
        run.say(Text(head + text(rng, 100), text(rng, 16), 1.0 + 0.001 * number))
    burst = [run._live[str(number)][0] for number in range(2, 7)]

    assert run._live["1"][0].hit_tokens == 0
    assert run.feeds["b0"].holdings.blocks == 0
    assert {ticket.hit_tokens for ticket in burst} == {8000}
    predicted, reported = shares(run.finish())
    assert predicted == reported


def test_a_prompt_under_way_is_forgotten_if_its_blocks_never_come() -> None:
    run = ExactBench(1, 307_328)
    run.losing.add("b0")  # as if the engine had dropped it: it never tells
    rng = Random(1)
    head = text(rng, 4000)
    run.say(Text(head, text(rng, 4), 1.0))
    asked = Chain(chain(tokens.unpack(head)), float(BLOCK), 4001, True)

    def believed(at: float) -> int:
        (row,) = run.core.explain(Query("m", "chat", asked, 10), at).backends
        return row.hit_tokens

    assert believed(1.01) == believed(9.0) == 4000
    run.finish()
    assert believed(run.now + 1.0) == 0


def test_a_loss_brings_back_what_was_learnt_from_sending() -> None:
    run = ExactBench(1, 307_328)
    rng = Random(2)
    head = text(rng, 4000)
    run.say(Text(head, text(rng, 4), 1.0))
    run.finish()
    assert run.status("b0").mode == "exact"

    run.losing.add("b0")
    run.say(Text(text(rng, 4000), text(rng, 4), run.now + 5.0))
    run.finish()
    run.losing.clear()
    run.say(Text(text(rng, 4000), text(rng, 4), run.now + 5.0))
    run.finish()
    assert run.status("b0").gaps == 1
    run.feeds["b0"].replay_failed()
    assert run.status("b0").mode == "approximate"
    assert run.status("b0").losses == 1

    asked = Chain(chain(tokens.unpack(head)), float(BLOCK), 4001, True)
    (row,) = run.core.explain(Query("m", "chat", asked, 10), run.now + 60.0).backends
    assert row.hit_tokens == 4000


def test_a_chain_that_is_no_exact_tokens_is_the_tries_alone() -> None:
    run = ExactBench(1, 307_328)
    guessed = Chain(array("Q", range(50)), 60.0, 3000, False)
    ticket = run.core.admit(Query("m", "chat", guessed, 10), 1.0)
    assert isinstance(ticket, Ticket)
    later = run.core.explain(Query("m", "chat", guessed, 10), 500.0)
    assert later.backends[0].hit_tokens == 3000


def test_prompts_of_another_model_on_the_backend_do_not_ask_its_events() -> None:
    run = ExactBench(1, 307_328)
    ids = list(range(1600))
    own = chain_tokens(ids, 99, BLOCK)
    exactness = run.core._fleet.exactness
    run.core._fleet.trie.insert(0, own, 1.0)
    asked = Chain(own, float(BLOCK), 1601, True)
    assert exactness.lookup("other", asked, 500.0) == [(100, 1)]
    assert exactness.lookup("m", asked, 500.0) == []


def test_a_restart_in_the_metrics_forgets_at_once() -> None:
    run = ExactBench(1, 307_328)
    rng = Random(2)
    run.say(Text(text(rng, 4000), text(rng, 4), 1.0))
    run.finish()
    assert run.feeds["b0"].holdings.blocks == 250
    run.until(run.now + 1.0)
    run.replicas["b0"].started_at = 100.0
    run.until(run.now + 1.0)

    assert run.feeds["b0"].holdings.blocks == 0
    assert run.feeds["b0"].replay_from == 0
    assert run.status("b0").restarts == 1


def test_following_again_keeps_the_feed_and_another_spec_begins_anew() -> None:
    run = ExactBench(1, 307_328)
    feed = run.feeds["b0"]
    assert run.core.follow("b0", SPEC) is feed
    other = run.core.follow("b0", EventSpec("m", SALT + 1, BLOCK))
    assert other is not feed
    assert run.status("b0").mode == "approximate"

    run.core.unfollow("b0")
    assert run.status("b0").mode == "off"
    assert run.core.follow("nobody", SPEC) is None
    feed.unlinked()  # its reader may still hold it
    assert run.status("b0").mode == "off"


def test_memory_of_a_backend_no_longer_followed_is_given_back() -> None:
    run = ExactBench(2, 307_328)
    rng = Random(2)
    for number in range(8):
        run.say(Text(text(rng, 4000), text(rng, 4), float(number)))
    run.finish()
    exactness = run.core._fleet.exactness
    assert exactness.bytes > 0
    for name in run.replicas:
        run.core.unfollow(name)
    while run.core.sweep():
        pass
    assert exactness.bytes == 0


def test_a_model_that_proves_to_be_an_adapter_is_not_exact() -> None:
    """Its adapter's and the engine's own blocks would be each other's hits."""
    run = ExactBench(1, 307_328)
    assert run.status("b0").mode == "exact"
    ids = list(range(64))
    told: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [1, 2, 3, 4],
        "token_ids": ids,
    }
    told |= {"parent_block_hash": None, "block_size": 16, "medium": "GPU", "lora_id": 1}
    run.feeds["b0"].live(0, msgspec.msgpack.encode([0.0, [{**told, "lora_name": "m"}], 0]))
    while run.feeds["b0"].step():
        pass
    assert run.status("b0").mode == "approximate"
    asked = Chain(chain(ids), float(BLOCK), 65, True)
    (row,) = run.core.explain(Query("m", "chat", asked, 10), 9.0).backends
    assert row.hit_tokens == 0


def test_events_that_never_fit_the_answers_are_not_believed() -> None:
    """A wrong tokenizer: the tokens told of are not those of our chains, so every hit is a surprise."""
    run = ExactBench(1, 307_328)
    run.shift = 1
    rng = Random(4)
    head = text(rng, 4000)
    for number in range(40):
        run.say(Text(head + text(rng, 100), text(rng, 4), 1.0 + 2.0 * number))
        if number == 10:
            assert run.status("b0").mode == "exact"
    seen = run.finish()

    assert run.feeds["b0"].refuted
    assert run.status("b0").mode == "approximate"
    assert {one.predicted for one in seen[1:15]} == {0}
    assert all(abs(one.predicted - one.reported) <= BLOCK for one in seen[-15:])


def test_events_that_fit_are_believed_though_a_few_answers_surprise() -> None:
    run = ExactBench(1, 307_328)
    rng = Random(5)
    head = text(rng, 4000)
    for number in range(60):
        run.shift = number % 3 == 0  # two of three fit
        run.say(Text(head + text(rng, 100), text(rng, 4), 1.0 + 2.0 * number))
    run.finish()

    assert run.status("b0").mode == "exact"


def test_a_restarted_engine_is_heard_anew_after_it_was_refuted() -> None:
    run = ExactBench(1, 307_328)
    feed = run.feeds["b0"]
    feed.refute()
    assert not feed.exact
    feed.restart_told()
    feed.replay_ended()
    feed.step()

    assert feed.exact
