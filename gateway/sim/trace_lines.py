"""A generated workload as lines of a block-hash trace: what `replay` and other tools read.

The form of our recorder and of Mooncake's traces. Conversations become open-loop: an answer is
taken to last as long as on an idle engine.
"""

from collections.abc import Iterator

import orjson

from gateway.sim.profiles import H100_8B
from gateway.sim.traffic import BLOCK_TOKENS, Dialogue, Workload

TRACE_BLOCK_TOKENS = 512
_TOKEN_S = H100_8B.engine.step_s


def lines(workload: Workload) -> Iterator[bytes]:
    """Yield the workload's requests in order of time, one JSON object and a newline each."""
    requests = sorted(
        (at, number, index)
        for number, dialogue in enumerate(workload.dialogues)
        for index, at in enumerate(_times(dialogue))
    )
    numbers: dict[int, int] = {}  # of block hashes, in order of appearance
    for at, number, index in requests:
        dialogue = workload.dialogues[number]
        ask = dialogue.asks[index]
        ends = range(TRACE_BLOCK_TOKENS, ask.prompt_tokens + 1, TRACE_BLOCK_TOKENS)
        hashes = [dialogue.hashes[end // BLOCK_TOKENS - 1] for end in ends]
        yield orjson.dumps(
            {
                "timestamp": round(at * 1000),
                "class": dialogue.cls,
                "input_length": ask.prompt_tokens,
                "output_length": ask.output_tokens,
                "hash_ids": [numbers.setdefault(known, len(numbers)) for known in hashes],
                "block_tokens": TRACE_BLOCK_TOKENS,
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


def _times(dialogue: Dialogue) -> Iterator[float]:
    at = dialogue.start_s
    for number, ask in enumerate(dialogue.asks):
        at += ask.think_s if number else 0.0
        yield at
        at += ask.output_tokens * _TOKEN_S
