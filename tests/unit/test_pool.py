from gateway.core.cost import refresh
from gateway.core.ledger import Account
from gateway.core.pool import Pool, fill
from gateway.core.settings import ModelSpec
from tests.core_kit import account, demand, query


def pool(count: int) -> Pool:
    rows = [account(slot) for slot in range(count)]
    return Pool(ModelSpec("m", tuple(row.name for row in rows)), rows)


def slots(rows: list[Account]) -> list[int]:
    return [row.slot for row in rows]


def by_slot(made: Pool) -> dict[int, Account]:
    return {row.slot: row for row in made.rows}


def test_down_and_draining_backends_are_not_eligible() -> None:
    made = pool(4)
    made.rows[1].up = False
    made.rows[2].draining = True
    assert slots(made.eligible(0.0, 1)) == [0, 3]


def test_a_change_counts_from_the_next_epoch() -> None:
    made = pool(2)
    made.eligible(0.0, 1)
    made.rows[0].up = False
    assert slots(made.eligible(0.0, 2)) == [1]


def test_an_open_breaker_takes_a_backend_out_until_its_delay_is_over() -> None:
    made = pool(2)
    breaker = made.rows[0].breaker
    for ident in range(3):
        breaker.failed(ident, 0.0)
    assert slots(made.eligible(0.0, 1)) == [1]
    assert slots(made.eligible(breaker.retry_at - 0.01, 1)) == [1]
    assert slots(made.eligible(breaker.retry_at, 1)) == [0, 1]


def test_when_all_breakers_are_open_every_backend_that_is_up_is_eligible() -> None:
    made = pool(3)
    made.rows[2].up = False
    for row in made.rows:
        for ident in range(3):
            row.breaker.failed(ident, 0.0)
    assert slots(made.eligible(0.0, 1)) == [0, 1]


def test_the_shortlist_has_the_longest_hits_and_the_least_loaded() -> None:
    made = pool(100)
    for row in made.rows:
        row.other_in_flight = 100 - row.slot
        refresh(row, 0.0)
    made.eligible(0.0, 1)
    chosen = slots(made.shortlist([(3, 0b1110), (9, 1)], by_slot(made), 0.0))
    assert {0, 1, 2, 3} <= set(chosen)
    assert set(range(84, 100)) <= set(chosen)
    assert len(chosen) == len(set(chosen)) == 20


def test_of_many_homes_the_least_loaded_are_on_the_shortlist() -> None:
    made = pool(100)
    for row in made.rows:
        row.other_in_flight = row.slot if row.slot >= 50 else 200 - row.slot
        refresh(row, 0.0)
    made.eligible(0.0, 1)
    chosen = slots(made.shortlist([(9, (1 << 50) - 1)], by_slot(made), 0.0))
    assert set(chosen) == set(range(50, 66)) | set(range(42, 50))


def test_an_ineligible_home_is_not_on_the_shortlist() -> None:
    made = pool(60)
    made.rows[59].up = False
    for row in made.rows:
        row.other_in_flight = row.slot
        refresh(row, 0.0)
    made.eligible(0.0, 1)
    chosen = slots(made.shortlist([(9, 1 << 59 | 1 << 58)], by_slot(made), 0.0))
    assert 58 in chosen
    assert 59 not in chosen


def test_fill_gives_each_backend_what_it_holds() -> None:
    made = pool(3)
    wanted = query(("a", 640), tail=5)
    fill(made.rows, [(4, 0b001), (10, 0b100)], demand(wanted))
    assert [row.depth for row in made.rows] == [4, 0, 10]
    assert [row.hit_tokens for row in made.rows] == [256, 0, 640]
    assert [row.uncached_tokens for row in made.rows] == [389, 645, 5]


def test_a_whole_hit_still_computes_one_token() -> None:
    made = pool(1)
    fill(made.rows, [(10, 1)], demand(query(("a", 640), tail=0)))
    assert made.rows[0].uncached_tokens == 1


def test_an_empty_prompt_counts_as_one_token() -> None:
    made = pool(1)
    fill(made.rows, [], demand(query(tail=0)))
    assert made.rows[0].uncached_tokens == 1
    assert made.rows[0].prefill_s > 0


def test_the_hit_share_is_weighted_by_tokens() -> None:
    made = pool(1)
    assert made.hit_share == 0.0
    for _ in range(500):
        made.note_hit(9000, 10_000)
        made.note_hit(0, 100)
    assert 0.85 < made.hit_share < 0.92
