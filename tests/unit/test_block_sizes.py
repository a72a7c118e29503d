"""The block size of a model's chains, from what its engines report; what another one forgets."""

import pytest

from gateway.core.types import Snapshot
from tests.core_kit import admit, dispatcher, done, query, serve


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([None, None], None),
        ([16, None], 16),
        ([16, 16], 16),
        ([16, 64], 16),
        ([48, 32], 16),
        ([0, 32], 32),
        ([16, 25], 16),
    ],
)
def test_size_fits_every_engine_or_is_the_smallest(
    sizes: list[int | None], expected: int | None
) -> None:
    core = dispatcher(2)
    assert core.block_tokens("m") is None
    for row, size in enumerate(sizes):
        core.observe(f"b{row}", Snapshot(at=1.0, block_tokens=size), 1.0)
    assert core.block_tokens("m") == expected
    assert core.block_tokens("nobody's") is None


def test_forgotten_prefixes_are_those_of_the_models_backends() -> None:
    core = dispatcher(2)
    wanted = query(("a", 2000))
    serve(core, wanted, 1.0)
    assert max(row.hit_tokens for row in core.explain(wanted, 2.0).backends) > 0
    core.forget_prefixes("nobody's")
    assert max(row.hit_tokens for row in core.explain(wanted, 2.0).backends) > 0
    core.forget_prefixes("m")
    assert max(row.hit_tokens for row in core.explain(wanted, 2.0).backends) == 0
    assert sum(row.index_blocks for row in core.backends(2.0)) == 0


def test_request_in_flight_outlives_what_is_forgotten() -> None:
    core = dispatcher(1)
    wanted = query(("a", 2000))
    serve(core, wanted, 1.0)
    lost, finished = admit(core, wanted, 2.0), admit(core, wanted, 2.0)
    core.forget_prefixes("m")
    assert not core.reassign(lost, 2.1)
    core.finish(lost, done(prefilled=False), 2.2)
    core.finish(finished, done(), 2.2)
    assert [row.in_flight for row in core.backends(3.0)] == [0]
