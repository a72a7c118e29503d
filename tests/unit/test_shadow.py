from random import Random

import pytest

from gateway.core.dispatcher import Dispatcher
from gateway.core.policies import POLICIES
from gateway.core.settings import CoreSettings, RoutingSpec
from gateway.core.types import Ticket
from tests.core_kit import admit, books, done, query, serve, settings

HOME = ("mine", 6400)


def shaded(live: str, shadow: str | None, backends: int = 4) -> CoreSettings:
    plain = settings(backends)
    return CoreSettings(
        plain.models, plain.backends, plain.classes, RoutingSpec(live, shadow=shadow)
    )


def core(live: str, shadow: str | None, backends: int = 4) -> Dispatcher:
    return Dispatcher(shaded(live, shadow, backends), Random(1), 0.0)


def traffic(made: Dispatcher, count: int = 150) -> list[tuple[str, int, int, str, object]]:
    """Everything a caller sees of the decisions for some conversations under way at once."""
    rng = Random(7)
    seen: list[tuple[str, int, int, str, object]] = []
    live: list[Ticket] = []
    for turn in range(count):
        now = 0.05 * turn
        who = rng.randrange(12)
        ticket = admit(made, query(("sys", 1280), (f"c{who}", 640 * (1 + turn // 12))), now)
        seen.append(
            (
                ticket.backend,
                ticket.hit_tokens,
                ticket.uncached_tokens,
                ticket.reason,
                list(ticket.trail),
            )
        )
        live.append(ticket)
        if len(live) > 10:
            gone = live.pop(rng.randrange(10))
            made.first_token(gone, now)
            made.finish(gone, done(), now)
    return seen


@pytest.mark.parametrize("shadow", sorted(POLICIES))
@pytest.mark.parametrize("live", ["cost", "weights", "power_of_two"])
def test_a_shadow_changes_no_live_decision_and_nothing_it_shows(live: str, shadow: str) -> None:
    plain, watched = core(live, None), core(live, shadow)
    assert traffic(plain) == traffic(watched)
    assert books(plain) == books(watched)
    tally = watched.shadow
    assert tally is not None
    assert tally.same + tally.different == 150


@pytest.mark.parametrize("policy", ["cost", "lmetric", "dynamo"])
def test_the_policy_in_force_as_its_own_shadow_differs_only_in_ties(policy: str) -> None:
    made = core(policy, policy)
    serve(made, query(HOME), 0.0)
    for turn in range(20):
        serve(made, query(HOME, (f"u{turn}", 640)), 1.0 + turn)
    tally = made.shadow
    assert tally is not None
    assert tally.different <= 1
    assert tally.saved_s <= 0.01


def test_without_a_shadow_nothing_is_counted() -> None:
    made = core("cost", None)
    serve(made, query(HOME), 0.0)
    assert made.shadow is None


def test_a_shadow_that_would_go_home_saves_what_recomputing_costs() -> None:
    made = core("round_robin", "cost", backends=2)
    first = serve(made, query(HOME), 0.0).backend
    ticket = admit(made, query(HOME, ("u", 640)), 60.0)
    assert ticket.backend != first  # round robin's other turn
    tally = made.shadow
    assert tally is not None
    assert tally.different >= 1
    row = made._fleet.by_name[first]
    prefill = row.engine.prefill_s(7050, 7050) - row.engine.prefill_s(650, 7050)
    assert tally.saved_s == pytest.approx(prefill, rel=0.1)
    assert tally.lost_s == 0.0


def test_a_shadow_that_would_leave_home_loses_it() -> None:
    made = core("cost", "round_robin", backends=2)
    serve(made, query(HOME), 0.0)
    for turn in range(6):
        serve(made, query(HOME, (f"u{turn}", 640)), 60.0 * (1 + turn))
    tally = made.shadow
    assert tally is not None
    assert tally.different >= 2
    assert tally.lost_s > 10 * tally.saved_s


def test_requests_without_a_prefill_are_not_counted() -> None:
    made = core("cost", "random")
    admit(made, query(HOME, prefills=False), 0.0)
    tally = made.shadow
    assert tally is not None
    assert (tally.same, tally.different) == (0, 0)


def test_explaining_is_not_counted() -> None:
    made = core("cost", "random")
    made.explain(query(HOME), 0.0)
    tally = made.shadow
    assert tally is not None
    assert tally.same + tally.different == 0


def test_a_retry_is_a_decision_too() -> None:
    made = core("cost", "least_requests")
    ticket = admit(made, query(HOME), 0.0)
    made.attempt_failed(ticket, 0.1)
    assert made.reassign(ticket, 0.1)
    tally = made.shadow
    assert tally is not None
    assert tally.same + tally.different == 2


def test_a_reload_keeps_the_tally_of_the_same_shadow_and_starts_another_at_zero() -> None:
    made = core("cost", "random")
    serve(made, query(HOME), 0.0)
    made.apply(shaded("weights", "random"), 1.0)
    serve(made, query(HOME), 2.0)
    tally = made.shadow
    assert tally is not None
    assert (tally.policy, tally.same + tally.different) == ("random", 2)
    made.apply(shaded("weights", "lmetric"), 3.0)
    fresh = made.shadow
    assert fresh is not None
    assert (fresh.policy, fresh.same, fresh.different) == ("lmetric", 0, 0)
    made.apply(shaded("weights", None), 4.0)
    serve(made, query(HOME), 5.0)
    assert made.shadow is None


def test_an_unknown_shadow_is_refused_and_the_old_settings_stay() -> None:
    made = core("cost", "random")
    with pytest.raises(ValueError, match="unknown policy 'best'"):
        made.apply(shaded("weights", "best"), 1.0)
    assert made.policy == "cost"
    assert made.shadow is not None
    with pytest.raises(ValueError, match="unknown policy 'best'"):
        core("cost", "best")
