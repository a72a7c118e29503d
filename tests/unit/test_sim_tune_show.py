"""What a search came to: text, JSON, picture, configuration."""

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from gateway.sim.tune import DEFAULTS, FOUND, REFERENCE, Check, Task, Trial, Tuning
from gateway.sim.tune_goals import GPUS, OBJECTIVES
from gateway.sim.tune_runs import Source
from gateway.sim.tune_show import as_json, config, picture, text, verdict, warning
from gateway.sim.tune_space import knobs

GOALS = (OBJECTIVES["ttft_p95"], OBJECTIVES["goodput"])
KNOBS = knobs("cost", ["queue.owed_s", "queue.steal_s"])
PNG = b"\x89PNG\r\n\x1a\n"


def row(ttft: float, goodput: float) -> dict[str, Any]:
    return {
        "trace": "synthetic:unique",
        "policy": "cost",
        "load": None,
        "rate": 9.0,
        "replicas": 3,
        "requests": 3000,
        "ttft_p95_s": ttft,
        "goodput_rps": goodput,
        "slo_ratio": 1.0,
        "classes": {},
    }


def tuning(*, goals: Any = GOALS, trials: int = 3, check: Check | None = None) -> Tuning:
    task = Task(Source("synthetic:unique"), goals, KNOBS, rate=9.0, replicas=3)
    made = [Trial(0, (), row(1.0, 10.0))]
    for number in range(1, trials):
        values = ((KNOBS[0].key, 0.5 + number / 100), (KNOBS[1].key, 0.125))
        made.append(Trial(number, values, row(1.0 - number / 100, 10.0 - number / 200)))
    return Tuning(task, made, check)


def checked(**more: Any) -> Check:
    rows = {DEFAULTS: row(1.0, 9.0), FOUND: row(0.9, 9.0), REFERENCE: row(4.0, 3.0)}
    return Check(rows, **{"score": 0.95, "better_on": 3, **more})


def test_the_configuration_is_the_found_setting_where_it_held() -> None:
    held = tuning(check=checked())
    assert verdict(held).startswith("trial 2 holds on held-out traffic: score 0.950")
    assert yaml.safe_load(config(held)) == {"queue": {"owed_s": 0.52}}
    assert text(held).endswith("queue:\n  owed_s: 0.52")


def test_the_configuration_changes_nothing_where_it_did_not_hold() -> None:
    lucky = tuning(check=checked(better_on=1))
    assert verdict(lucky).startswith("keep the defaults: trial 2 does not hold")
    assert yaml.safe_load(config(lucky)) is None
    worse = tuning(check=checked(worse_slo=True))
    assert "fewer requests of some class within SLO" in verdict(worse)
    nothing = tuning(trials=1, check=checked(score=None))
    assert verdict(nothing) == "nothing better than the defaults was found"
    assert yaml.safe_load(config(nothing)) is None


def test_an_interrupted_search_says_that_nothing_was_checked() -> None:
    shown = text(tuning())
    assert "Interrupted: not checked on traffic the search has not seen." in shown
    assert "# radixgate tune synthetic:unique: trial 2, interrupted before it was checked" in shown
    assert "no trial was finished" in text(Tuning(tuning().task))


def test_the_front_has_the_defaults_first_and_a_limit() -> None:
    lines = text(tuning(trials=20)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("trial"))
    assert lines[at].split() == ["trial", "TTFT", "p95", "goodput/s", "in", "SLO", "score"]
    numbers = [line.split()[0] for line in lines[at + 1 : at + 10]]
    assert numbers == ["0", *(str(number) for number in range(19, 11, -1))]  # best scores
    assert lines[at + 10] == "      and 11 more (--json has all)"
    assert lines[at + 2].endswith("<- found")


def test_few_requests_are_warned_of() -> None:
    assert warning(tuning(check=checked())) == ""
    check = checked()
    check.rows[DEFAULTS]["requests"] = 90
    assert "Only 30 requests" in text(tuning(check=check))


def test_replicas_that_are_needed_are_told() -> None:
    check = checked()
    for label, gpus in ((DEFAULTS, 7), (FOUND, 6), (REFERENCE, None)):
        check.rows[label]["gpus"] = gpus
    made = tuning(goals=(*GOALS, GPUS), check=check)
    for one in made.trials:
        one.row["gpus"] = 7
    assert "held-out traffic: defaults 7, found 6, round_robin more than 64" in text(made)


def test_json_has_every_trial_and_says_whether_it_was_interrupted() -> None:
    shown = orjson.loads(orjson.dumps(as_json(tuning(check=checked()), interrupted=False)))
    assert [one["number"] for one in shown["trials"]] == [0, 1, 2]
    assert shown["trials"][0]["values"] == {"queue.owed_s": 0.5, "queue.steal_s": 0.125}
    assert (shown["front"], shown["found"], shown["interrupted"]) == ([2, 1, 0], 2, False)
    assert shown["held_out"]["holds"] is True
    assert yaml.safe_load(shown["config"]) == {"queue": {"owed_s": 0.52}}
    assert as_json(tuning(), interrupted=True)["held_out"] is None


@pytest.mark.parametrize("goals", [GOALS, GOALS[:1]])
def test_a_picture_is_drawn(goals: Any, tmp_path: Path) -> None:
    file = tmp_path / "front.png"
    picture(tuning(goals=goals), file)
    assert file.read_bytes().startswith(PNG)
