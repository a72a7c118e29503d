"""What `tune` may change, and the configuration that comes of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import build
from gateway.config.load import load
from gateway.config.schema import Config
from gateway.sim.tune_space import TUNABLE, Knob, as_values, fragment, knobs
from gateway.sim.tune_space import apply as applied

EVERY = [(policy, knob) for policy in TUNABLE for knob in knobs(policy, ["*"])]
BACKEND = ["http://127.0.0.1:8001"]


def loaded(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "fragment.yaml"
    file.write_text(text)
    return load(file, backends=BACKEND).config


@pytest.mark.parametrize(("policy", "knob"), EVERY, ids=lambda value: getattr(value, "key", value))
def test_a_gateway_given_the_fragment_runs_with_what_was_simulated(
    policy: str, knob: Knob, tmp_path: Path
) -> None:
    assert knob.low <= knob.default <= knob.high
    for value in (knob.low, knob.high):
        values = ((knob.key, value),)
        served = build.core_settings(loaded(tmp_path, fragment(policy, values)), {})
        plain = build.core_settings(load(backends=BACKEND).config, {})
        plain = replace(plain, routing=replace(plain.routing, policy=policy))
        if policy != "cost":
            plain = replace(plain, queue=replace(plain.queue, enabled=False))
        assert applied(plain, values) == served
        assert served != plain or value == knob.default


def test_a_fragment_says_only_what_differs_from_the_defaults(tmp_path: Path) -> None:
    values = (("routing.cost.eviction_weight", 10.0), ("queue.owed_s", 0.75))
    text = fragment("cost", values, ["why"])
    assert text == "# why\nqueue:\n  owed_s: 0.75\n"
    assert loaded(tmp_path, fragment("cost", (), ["nothing to change"])).queue.owed_s == 0.5


def test_a_fragment_for_a_configuration_says_what_differs_from_it(tmp_path: Path) -> None:
    own = loaded(tmp_path, "queue: {owed_s: 0.75}\nrouting: {policy: weights}\n")
    values = (("queue.owed_s", 0.75), ("queue.kv_share", 0.97))
    assert fragment("cost", values, (), own) == "routing:\n  policy: cost\n"
    assert fragment("cost", (("queue.owed_s", 0.5),), (), own).endswith("queue:\n  owed_s: 0.5\n")
    (knob,) = knobs("cost", ["queue.owed_s"], own)
    assert knob.default == 0.75
    off = loaded(tmp_path, "queue: {enabled: false}\nrouting: {policy: weights}\n")
    assert fragment("weights", (), (), off) == "\n"


def test_keys_and_patterns_choose_and_may_narrow_the_range() -> None:
    chosen = knobs("cost", ["queue.*share", "queue.owed_s=0.2:2", "routing.cost.tpot_weight"])
    assert [knob.key for knob in chosen] == [
        "routing.cost.tpot_weight",
        "queue.owed_s",
        "queue.kv_share",
        "queue.overload_kv_share",
    ]
    assert (chosen[1].low, chosen[1].high) == (0.2, 2.0)


@pytest.mark.parametrize(
    ("policy", "wanted", "told"),
    [
        ("round_robin", [], "nothing to tune"),
        ("cost", ["queue.nothing"], "names no key of policy cost"),
        ("weights", ["queue.owed_s"], "names no key of policy weights"),
        ("cost", ["queue.owed_s=1"], "expected LOW:HIGH"),
        ("cost", ["queue.owed_s=2:1"], "expected a part of 0.1:4"),
        ("cost", ["queue.owed_s=0.2:99"], "expected a part of 0.1:4"),
        ("cost", ["queue.owed_s=0.2:nan"], "expected a part of 0.1:4"),
    ],
)
def test_what_cannot_be_searched_is_told(policy: str, wanted: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        knobs(policy, wanted)


def test_what_is_run_has_the_digits_that_are_printed_and_stays_in_range() -> None:
    knob = Knob("queue.owed_s", 0.1234, 2.0)
    drawn = {knob.key: 0.66666}
    assert as_values([knob], drawn) == ((knob.key, 0.667),)
    assert knob.settled(0.12341) == 0.1234
    assert knob.settled(1.9999) == 2.0
