from collections import Counter
from itertools import islice
from random import Random

from gateway.core.ring import Ring

NAMES = [f"b{i}" for i in range(8)]


def owner(ring: Ring, key: int) -> str:
    return next(ring.walk(key))


def keys(count: int) -> list[int]:
    rng = Random(5)
    return [rng.getrandbits(64) for _ in range(count)]


def test_keys_are_shared_out_evenly() -> None:
    ring = Ring(NAMES, 256)
    counts = Counter(owner(ring, key) for key in keys(8000))
    assert max(counts.values()) < 1.25 * 1000
    assert min(counts.values()) > 0.75 * 1000


def test_a_backend_that_goes_moves_only_its_own_keys() -> None:
    before, after = Ring(NAMES, 64), Ring(NAMES[1:], 64)
    for key in keys(500):
        if owner(before, key) != NAMES[0]:
            assert owner(after, key) == owner(before, key)


def test_the_order_of_the_names_changes_nothing() -> None:
    one, other = Ring(NAMES, 16), Ring(NAMES[::-1], 16)
    assert all(owner(one, key) == owner(other, key) for key in keys(200))


def test_a_walk_passes_every_point_once_and_starts_over_at_the_end() -> None:
    ring = Ring(NAMES, 4)
    assert Counter(ring.walk(1 << 63)) == dict.fromkeys(NAMES, 4)
    assert list(islice(ring.walk((1 << 64) - 1), 1)) == list(islice(ring.walk(0), 1))
