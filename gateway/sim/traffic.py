"""What is asked of a simulated fleet: dialogues as lengths and block hashes, without any text.

Values only. A dialogue's whole token stream is one chain of blocks made beforehand, so that a
prompt of 40k tokens costs a slice of an array. Never text, never a clock.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from gateway.core.settings import Slo

BLOCK_TOKENS = 16

# results.md, Workloads
CODING_SLO = Slo(ttft_s=5.0, tpot_s=0.1)
CHAT_SLO = Slo(ttft_s=2.0, tpot_s=0.1)
TRACE_SLO = Slo(ttft_s=5.0, tpot_s=0.1)


class Ask(NamedTuple):
    """One request of a dialogue: sent `think_s` after the last answer's end.

    `prompt_tokens` counts from the dialogue's beginning, earlier answers included.
    """

    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0


class Dialogue(NamedTuple):
    """Requests that follow one another; `hashes` covers prompts and answers, 16 tokens a block.

    `cls` None = the gateway's own rules say.
    """

    start_s: float
    cls: str | None
    hashes: "array[int]"
    asks: tuple[Ask, ...]


@dataclass(slots=True, frozen=True)
class Workload:
    """Dialogues in order of their start, all before `seconds`; `warm_s` of them are not counted.

    `slos` are the targets by class; `rate` is what they were made or scaled to.
    """

    name: str
    dialogues: Sequence[Dialogue]
    seconds: float
    warm_s: float
    slos: Mapping[str, Slo]
    rate: float
    default_class: str = "chat"


Traffic = Callable[[float, int], Workload]
"""Makes a workload of a rate factor and a seed; the same arguments give the same workload.

The factor is requests per second for what is generated, and speed-up for what was recorded.
"""


def fresh(rng: Random, blocks: int) -> "array[int]":
    """Return hashes of blocks that nobody has seen."""
    made = array("Q")
    made.frombytes(rng.randbytes(8 * blocks))
    return made


def join(rng: Random, tokens: int, *shared: "array[int]") -> "array[int]":
    """Return the chain of a stream of `tokens` that begins with the shared blocks."""
    made = array("Q")
    for part in shared:
        made += part
    made += fresh(rng, max(0, tokens // BLOCK_TOKENS - len(made)))
    return made


def blocks_in(tokens: int) -> int:
    """Return the full blocks of a stream's first `tokens`."""
    return tokens // BLOCK_TOKENS


def in_order(dialogues: Iterable[Dialogue]) -> list[Dialogue]:
    """Return the dialogues by their start."""
    return sorted(dialogues, key=_start)


def _start(dialogue: Dialogue) -> float:
    return dialogue.start_s
