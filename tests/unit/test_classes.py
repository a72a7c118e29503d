import pytest

from gateway.core.bucket import Bucket
from gateway.core.classes import Classes, used_tokens
from gateway.core.settings import BucketSpec, ClassSpec
from gateway.core.types import Finish, Outcome, Ticket, Usage
from tests.core_kit import account, done, query, ticket_for

SPEC = BucketSpec(10.0, 1000.0)
LIMITED = ClassSpec("chat", default=True, bucket=SPEC)


def ticket() -> Ticket:
    made = ticket_for(query(("p", 640), tail=0), account(), hit=320)
    made.reserved_tokens = 570.0
    return made


@pytest.mark.parametrize(
    ("usage", "chunks", "used"),
    [
        (Usage(700, 100, 300), 5, 500.0),
        (Usage(700, 100, None), 5, 480.0),
        (Usage(None, None, None), 5, 325.0),
        (Usage(100, 10, 200), 5, 10.0),
    ],
)
def test_what_was_used_comes_from_the_engine_where_it_says(
    usage: Usage, chunks: int, used: float
) -> None:
    assert used_tokens(ticket(), Finish(Outcome.OK, True, usage, chunks)) == used


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.CLIENT_CLOSED])
def test_a_request_that_never_ran_used_nothing(outcome: Outcome) -> None:
    assert used_tokens(ticket(), done(outcome, prefilled=False)) == 0.0


def test_a_client_that_leaves_before_the_first_token_has_used_its_uncached_prompt() -> None:
    assert used_tokens(ticket(), Finish(Outcome.CLIENT_CLOSED, prefilled=False)) == 320.0


def test_a_client_that_leaves_before_anything_was_sent_has_used_nothing() -> None:
    left = Finish(Outcome.CLIENT_CLOSED, prefilled=False, sent=False)
    assert used_tokens(ticket(), left) == 0.0


def test_an_unlimited_class_has_no_bucket() -> None:
    classes = Classes((ClassSpec("chat", default=True),), 0.0)
    assert classes.named("chat").bucket is None


def test_a_class_a_reload_removed_falls_to_the_default() -> None:
    classes = Classes((ClassSpec("coding"), LIMITED), 0.0)
    assert classes.named("gone").spec.name == "chat"


def test_a_reload_keeps_counts_and_what_was_spent() -> None:
    classes = Classes((LIMITED,), 0.0)
    books = classes.named("chat")
    books.admitted, books.rejected = 7, 3
    assert books.bucket is not None
    books.bucket.reserve(400, 0.0)
    classes.apply((LIMITED,), 0.0)
    after = classes.named("chat")
    assert (after.admitted, after.rejected) == (7, 3)
    assert after.bucket is not None
    assert after.bucket.available(0.0) == 600.0


def test_a_reservation_is_settled_in_the_bucket_it_came_from() -> None:
    classes = Classes((LIMITED,), 0.0)
    old = classes.named("chat").bucket
    assert isinstance(old, Bucket)
    held = ticket()
    old.reserve(held.reserved_tokens, 0.0)
    classes.hold(held, (old,))
    classes.apply((ClassSpec("chat", default=True),), 0.0)
    classes.apply((LIMITED,), 0.0)
    new = classes.named("chat").bucket
    assert isinstance(new, Bucket)
    new.reserve(100, 0.0)
    classes.settle(held, done(Outcome.UPSTREAM_ERROR, prefilled=False), 0.0)
    assert old.available(0.0) == 1000.0
    assert new.available(0.0) == 900.0
    assert classes.reserved() == 0


def test_a_ticket_without_a_reservation_settles_nothing() -> None:
    classes = Classes((LIMITED,), 0.0)
    bucket = classes.named("chat").bucket
    assert bucket is not None
    bucket.reserve(500, 0.0)
    classes.settle(ticket(), done(), 0.0)
    assert bucket.available(0.0) == 500.0
