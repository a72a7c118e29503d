"""A prompt that is still being encoded: what a request waits for between its parsing and admission.

A job is plain data until somebody waits for it: dropping one unawaited costs nothing and leaves
nothing behind. Must never decide what a chain is made of: `finish` and `give_up` are the prompter's.

How a prompter uses it (`TokenPrompter.start`):

    left = texts that no cache knows, in order
    if sum(map(len, left)) <= encoder.inline_chars:
        return finish([encoder.encode(text) for text in left])
    return EncodeJob(pool, encoder, left, finish, give_up)
"""

from array import array
from collections.abc import Callable, Sequence

from gateway.core.types import Chain
from gateway.prompt.pool import EncoderPool, Encodes, PoolBehind

BUSY = "encoder_busy"
"""The pool had too much to do: this request was routed on byte blocks."""

FAILED = "encoder_failed"
"""The text could not be encoded (half a surrogate pair): routed on byte blocks."""


class EncodeJob:
    """A chain in the making (`core.prompter.PendingChain`).

    `finish(ids)` gets the ids of each text in order (array of typecode I), puts them into the
    caches and returns the chain; `give_up(reason)` counts the reason and returns the byte chain.
    One of them is called, once, on the loop's thread, unless the wait is cancelled: then neither.
    Both must hold what they need of the request by themselves: `ParsedRequest.model` has its
    canonical name only while `start` runs.
    """

    __slots__ = ("_encoder", "_finish", "_give_up", "_pool", "_texts")

    def __init__(
        self,
        pool: EncoderPool,
        encoder: Encodes,
        texts: Sequence[str],
        finish: Callable[[Sequence["array[int]"]], Chain],
        give_up: Callable[[str], Chain],
    ) -> None:
        self._pool = pool
        self._encoder = encoder
        self._texts = texts
        self._finish = finish
        self._give_up = give_up

    async def wait(self) -> Chain:
        """Encode on the pool and return the chain; the byte chain where that is not to be had."""
        try:
            ids = await self._pool.encode(self._encoder, self._texts)
        except PoolBehind:
            return self._give_up(BUSY)
        except ValueError:  # UnicodeEncodeError is one
            return self._give_up(FAILED)
        return self._finish(ids)
