"""From a request to its chain without any vocabulary: byte blocks and a learnt bytes-per-token.

Both are learnt from the token counts engines report: the ratio of a long prompt's own conversation
where it is known, else tokens = overhead + bytes / ratio per model and class (`core/token_fit.py`).
Must stay bounded: every table has a cap.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

import msgspec

from gateway.core.answer import Said, grown
from gateway.core.canonical import canonical
from gateway.core.chain import BLOCK_BYTES, narrow_blocks
from gateway.core.chain_memo import ChainMemo
from gateway.core.request import ParsedRequest
from gateway.core.saved import Ratios
from gateway.core.token_fit import LONG_BYTES, TokenFit
from gateway.core.types import Chain

ID_BYTES: Final = 4.0
"""Prompts of token ids are hashed as 32-bit words: exact by construction."""

MAX_CONVERSATIONS: Final = 32_768
MAX_MODELS: Final = 4_096
_ANCHORS: Final = (511, 127, 31, 7, 0)
"""Block positions by which a conversation is known again: the deepest that was seen wins.

The first block alone would be the system prompt that all conversations of an application share.
"""

_SHORT: Final = _ANCHORS[-2]  # chains up to here have the first anchor alone

_CONVERSATION_WEIGHT: Final = 0.5
_SLOPE_RANGE: Final = (1 / 64, 4.0)  # tokens per byte
_UNKNOWN: Final = TokenFit()
_SLICE: Final = 4_096  # conversations written down at a time
_encode: Final = msgspec.msgpack.Encoder().encode


class PendingChain(Protocol):
    """A chain that is still being made. Dropping it unawaited costs nothing."""

    async def wait(self) -> Chain:
        """Return the chain when it is made; may be cancelled at any time."""
        ...


class Prompter(Protocol):
    """What the edge needs of a prompt: its chain, and a place to report the real count."""

    def start(
        self, request: ParsedRequest, *, isolation: str = "", cls: str = ""
    ) -> "Chain | PendingChain":
        """Return the prompt's chain, or, where that would hold the caller up, one to wait for.

        All that is needed of `request.model` is read before this returns.
        """
        ...

    def chain(self, request: ParsedRequest, *, isolation: str = "", cls: str = "") -> Chain:
        """Return the prompt's chain now. `cls` sharpens an estimate where the class is known."""
        ...

    def grow(self, chain: Chain, said: Said, sampled_tokens: int | None) -> "array[int] | None":
        """Return the hashes of a prompt and its answer, as the next turn will send them.

        `sampled_tokens` are what the engine counted. None = not known, or not a block more than the
        prompt's.
        """
        ...

    def learn(self, model: str, cls: str, chain: Chain, prompt_tokens: int) -> None:
        """Take in what an engine reported for this chain."""
        ...


class BytePrompter:
    """Byte blocks, and token counts estimated from bytes."""

    def __init__(self, salt: int, block_bytes: int = BLOCK_BYTES) -> None:
        self._salt = salt & 0xFFFF_FFFF_FFFF_FFFF
        self._block_bytes = block_bytes
        self._narrow_blocks = narrow_blocks(block_bytes)
        self._memo = ChainMemo(self._salt, block_bytes)
        self._conversations: OrderedDict[int, float] = OrderedDict()
        self._models: dict[tuple[str, str], TokenFit] = {}

    def use_block_bytes(self, block_bytes: int) -> bool:
        """Chain by blocks of this size from now on; return whether it is another one.

        What was learnt of single conversations is known by their blocks, and forgotten with them.
        """
        if block_bytes == self._block_bytes:
            return False
        self._block_bytes = block_bytes
        self._narrow_blocks = narrow_blocks(block_bytes)
        self._memo = ChainMemo(self._salt, block_bytes)
        self._conversations.clear()
        return True

    def chain(self, request: ParsedRequest, *, isolation: str = "", cls: str = "") -> Chain:
        """Return the prompt's chain, its token count estimated."""
        stream = canonical(request, isolation=isolation)
        block_bytes = self._block_bytes
        hashes = self._memo.chain(stream)
        size = len(stream)
        overhead = 0.0
        if "prompt" in request.data and _is_token_ids(request.data):
            slope = 1.0 / ID_BYTES
        elif size >= LONG_BYTES and (known := self._known_slope(hashes)):
            slope = known
        else:
            fit = self._fit(request.model or "", cls)
            overhead, slope = fit.overhead, fit.slope
        tokens = round(overhead + size * slope) or 1
        count, narrow = len(hashes), self._narrow_blocks
        covered = count * block_bytes
        if count > narrow:
            covered += (count - narrow) * block_bytes
        return Chain(  # positional: half the price of keywords
            hashes,
            block_bytes * slope,
            tokens,
            False,
            size,
            narrow,
            stream[covered:],
            hashes[-1] if count else self._salt,
            block_bytes,
        )

    start = chain  # bytes are hashed at 1 GB/s: there is nothing to wait for

    def grow(self, chain: Chain, said: Said, _sampled_tokens: int | None) -> "array[int] | None":
        """Return the hashes of the prompt and the answer after it."""
        return grown(chain, said)

    def learn(self, model: str, cls: str, chain: Chain, prompt_tokens: int) -> None:
        """Take in the prompt tokens an engine reported. `model` is the name the chain was made of.

        Nonsense (no tokens, no text) is ignored and the rest is held to what text can have.
        """
        if prompt_tokens <= 0 or chain.text_bytes <= 0:
            return
        low, high = _SLOPE_RANGE
        size = float(chain.text_bytes)
        tokens = float(prompt_tokens)
        slope = tokens / size
        if not low <= slope <= high:
            slope = low if slope < low else high
            tokens = slope * size
        models = self._models
        for key in ((model, cls), (model, "")):
            fit = models.get(key)
            if fit is None:
                fit = models[key] = TokenFit()
            fit.learn(size, tokens)
        if len(models) > MAX_MODELS:
            self._forget_models()
        if size >= LONG_BYTES:  # a short one's count is mostly its overhead
            self._learn_conversation(chain.hashes, slope)

    def export(self) -> Iterator[bytes]:
        """Yield what was learnt, in slices; conversations as their hashes."""
        models = [(*key, *fit.state) for key, fit in self._models.items()]
        known = list(self._conversations.items())
        yield _encode(Ratios(models, []))
        for start in range(0, len(known), _SLICE):
            yield _encode(Ratios([], known[start : start + _SLICE]))

    def restore(self, ratios: Iterable[Ratios]) -> None:
        """Go on from what an earlier process had learnt with the same salt."""
        for part in ratios:
            for model, cls, overhead, slope, short, middle, long in part.models[:MAX_MODELS]:
                self._models.setdefault(
                    (model, cls), TokenFit.of_state(overhead, slope, short, middle, long)
                )
            low, high = _SLOPE_RANGE
            for mark, slope in part.conversations:
                if low <= slope <= high and len(self._conversations) < MAX_CONVERSATIONS:
                    self._conversations.setdefault(mark, slope)

    def _learn_conversation(self, hashes: "array[int]", slope: float) -> None:
        known = self._conversations
        size = len(hashes)
        for anchor in _ANCHORS if size > _SHORT else _ANCHORS[-1:]:
            if anchor < size:
                mark = hashes[anchor]
                old = known.get(mark)
                if old is None:
                    known[mark] = slope
                    if len(known) > MAX_CONVERSATIONS:
                        known.popitem(last=False)
                else:
                    known[mark] = old + _CONVERSATION_WEIGHT * (slope - old)
                    known.move_to_end(mark)

    def _forget_models(self) -> None:
        """Make room for what is new; only a fleet of thousands of models ever comes here."""
        for key in list(self._models)[: len(self._models) - MAX_MODELS]:
            del self._models[key]

    def _known_slope(self, hashes: "array[int]") -> float | None:
        known = self._conversations
        size = len(hashes)
        for anchor in _ANCHORS if size > _SHORT else _ANCHORS[-1:]:
            if anchor < size and (slope := known.get(hashes[anchor])):
                return slope
        return None

    def _fit(self, model: str, cls: str) -> TokenFit:
        models = self._models
        return models.get((model, cls)) or models.get((model, "")) or _UNKNOWN


def _is_token_ids(data: dict[str, Any]) -> bool:
    prompt = data["prompt"]
    if not isinstance(prompt, list) or not prompt:
        return False
    first = prompt[0]
    return isinstance(first, int) or (isinstance(first, list) and "messages" not in data)
