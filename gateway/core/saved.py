"""What is kept of the index and of what was learnt over a restart: the shapes of the pieces.

Hashes, names from the configuration and numbers only: no field may ever hold a prompt, a key or
a client. A change of any shape or meaning here is a change of `VERSION`.
"""

from collections.abc import Callable
from typing import Final

import msgspec

VERSION: Final = 1

Way = Callable[[str], str]
"""How a model's prompts are chained, by its name: hashes of another way mean nothing."""


class SavedEngine(msgspec.Struct, frozen=True, array_like=True):
    """An engine model's learnt scales; they hold for the priors whose `profile` is told."""

    profile: tuple[float, ...]
    prefill_ratio: float
    tpot_ratio: float
    tpot_floor: float
    prefill_samples: int
    tpot_samples: int
    own: tuple[float, float]


class SavedBelief(msgspec.Struct, frozen=True, array_like=True):
    """What reports have shown of a cache's size and trust."""

    index_share: float
    tokens_per_block: float
    trust: float
    step: float
    grew: bool | None
    fits: float
    over: float


class SavedBackend(msgspec.Struct, frozen=True, array_like=True):
    """One backend: by what its process is known again, and what was learnt of it.

    `serves` has each model it served with the way its prompts are chained.
    """

    name: str
    draining: bool
    start_time: float | None
    prompt_tokens: float | None
    prefix_queries: float | None
    serves: dict[str, str]
    engine: SavedEngine
    belief: SavedBelief


class SavedModel(msgspec.Struct, frozen=True, array_like=True):
    """One model: its recent token hits, and the answer lengths of its classes: (mean, count)."""

    name: str
    hit_tokens: float
    prompt_tokens: float
    outputs: dict[str, tuple[float, int]]


class Learnt(msgspec.Struct, frozen=True, tag="learnt"):
    """All that was learnt; `at` is the clock of the ages in the `Visits` that follow."""

    at: float
    backends: list[SavedBackend]
    models: list[SavedModel]


SavedVisit = tuple[float, int, bytes, list[int]]
"""When a prompt was last used, and its chain: after the block hashed `anchor` (0 = none) `blocks`.

The last are how many of those blocks end where later visits have their anchors.
"""


class Visits(msgspec.Struct, frozen=True, tag="visits"):
    """A slice of what one backend holds, oldest first."""

    backend: str
    visits: list[SavedVisit]


Mean = tuple[float, float]
"""Bytes, tokens."""


class Ratios(msgspec.Struct, frozen=True, tag="ratios"):
    """How many tokens so many bytes are: by (model, class), and by a conversation's block hash."""

    models: list[tuple[str, str, float, float, Mean | None, Mean | None, Mean | None]]
    conversations: list[tuple[int, float]]


Piece = Learnt | Visits | Ratios
