from gateway.core.learn import PRIOR_OUTPUT_TOKENS, OutputLengths, learn_cache, learn_tpot, trust
from gateway.core.types import Finish, Outcome, Snapshot, Usage
from tests.core_kit import account, query, ticket_for


def test_the_prior_answer_length_is_capped_by_what_the_client_allows() -> None:
    lengths = OutputLengths()
    assert lengths.expected("m", "chat", None) == PRIOR_OUTPUT_TOKENS
    assert lengths.expected("m", "chat", 40) == 40
    assert lengths.expected("m", "chat", 0) == 0


def test_answer_lengths_are_learnt_per_model_and_class() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.learn("m", "chat", 30)
    assert 28 <= lengths.expected("m", "chat", None) <= 40
    assert lengths.expected("m", "coding", None) == PRIOR_OUTPUT_TOKENS
    assert lengths.expected("other", "chat", None) == PRIOR_OUTPUT_TOKENS


def test_one_endless_answer_moves_the_expectation_little() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.learn("m", "chat", 100)
    lengths.learn("m", "chat", 4000)
    assert lengths.expected("m", "chat", None) < 320


def test_removed_models_and_classes_are_forgotten() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.learn("m", "chat", 10)
    lengths.keep({"m"}, {"coding"})
    assert lengths.expected("m", "chat", None) == PRIOR_OUTPUT_TOKENS


def test_correct_predictions_keep_the_trust_full() -> None:
    row = account()
    ticket = ticket_for(query(("p", 6400)), row, hit=6400)
    ticket.known_blocks = 100
    for turn in range(50):
        learn_cache(row, ticket, 6384, float(turn))
    assert trust(row, 50.0) == 1.0
    assert row.index_share == 1.0
    assert row.hit_tokens_predicted == 50 * 6400
    assert row.hit_tokens_reported == 50 * 6384


def test_a_cache_that_is_never_there_is_not_believed_after_twenty_reports() -> None:
    row = account()
    ticket = ticket_for(query(("p", 6400)), row, hit=6400)
    ticket.known_blocks = 100
    for turn in range(20):
        learn_cache(row, ticket, 0, float(turn))
    assert trust(row, 20.0) < 0.1


def test_trust_comes_back_by_itself() -> None:
    row = account()
    row.trust, row.trust_at = 0.0, 100.0
    assert trust(row, 100.0) == 0.0
    assert 0.5 < trust(row, 160.0) < 0.9
    assert trust(row, 400.0) == 1.0


def test_a_small_hit_teaches_nothing() -> None:
    row = account()
    ticket = ticket_for(query(("p", 64)), row, hit=64)
    ticket.known_blocks = 1
    assert not learn_cache(row, ticket, 0, 1.0)
    assert row.trust == 1.0


def test_the_index_shrinks_less_where_the_engine_told_its_capacity() -> None:
    shares = []
    for snapshot in (Snapshot(at=0.0, kv_capacity_tokens=420_000), None):
        row = account()
        row.snapshot = snapshot
        ticket = ticket_for(query(("p", 6400)), row, hit=6400)
        ticket.known_blocks = 100
        for turn in range(100):
            learn_cache(row, ticket, 0, float(turn))
        shares.append(row.index_share)
    assert shares == [0.5, 1 / 64]


def test_the_index_grows_back_when_predictions_hold() -> None:
    row = account()
    row.index_share = 0.3
    ticket = ticket_for(query(("p", 6400)), row, hit=6400)
    ticket.known_blocks = 100
    for turn in range(100):
        learn_cache(row, ticket, 6384, float(turn))
    assert row.index_share == 1.0


def test_tpot_is_learnt_from_streams_only() -> None:
    end = Finish(Outcome.OK, True, Usage(None, 101, None), 0, last_token_at=3.0)
    for stream, samples in ((True, 1), (False, 0)):
        row = account()
        ticket = ticket_for(query(("p", 640), stream=stream), row)
        ticket.first_token_at = 1.0
        assert learn_tpot(row, ticket, end, 1.0) is stream
        assert row.engine.tpot_samples == samples


def test_a_stream_without_an_end_or_of_one_token_teaches_no_tpot() -> None:
    row = account()
    ticket = ticket_for(query(("p", 640)), row)
    ticket.first_token_at = 1.0
    assert not learn_tpot(row, ticket, Finish(Outcome.OK, True, Usage(None, 50)), 1.0)
    one = Finish(Outcome.OK, True, Usage(None, 1), last_token_at=2.0)
    assert not learn_tpot(row, ticket, one, 1.0)
