from gateway.core.learn import PRIOR_OUTPUT_TOKENS, OutputLengths, learn_tpot
from gateway.core.types import Finish, Outcome, Usage
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
