"""From a request to its chain without any vocabulary: byte blocks and a learnt bytes-per-token.

The ratio is learnt from the token counts engines report: per conversation where it is known,
else per model and class. Must stay bounded: every table has a cap.
"""

from array import array
from collections import OrderedDict
from typing import Any, Final, Protocol

from gateway.core.canonical import canonical
from gateway.core.chain import BLOCK_BYTES, chain_bytes, narrow_blocks
from gateway.core.request import ParsedRequest
from gateway.core.types import Chain

DEFAULT_RATIO: Final = 4.0
"""Bytes per token of English and code in current vocabularies, until an engine says otherwise."""

ID_BYTES: Final = 4.0
"""Prompts of token ids are hashed as 32-bit words: exact by construction."""

MAX_CONVERSATIONS: Final = 32_768
MAX_MODELS: Final = 4_096
_ANCHORS: Final = (511, 127, 31, 7, 0)
"""Block positions by which a conversation is known again: the deepest that was seen wins.

The first block alone would be the system prompt that all conversations of an application share.
"""

_CONVERSATION_WEIGHT: Final = 0.5
_MODEL_WEIGHT: Final = 0.1
_RATIO_RANGE: Final = (0.25, 64.0)


class Prompter(Protocol):
    """What the edge needs of a prompt: its chain, and a place to report the real count."""

    def chain(self, request: ParsedRequest, *, isolation: str = "", cls: str = "") -> Chain:
        """Return the prompt's chain. `cls` sharpens an estimate where the class is known."""
        ...

    def learn(self, model: str, cls: str, chain: Chain, prompt_tokens: int) -> None:
        """Take in what an engine reported for this chain."""
        ...


class BytePrompter:
    """Byte blocks, and token counts estimated from bytes."""

    def __init__(self, salt: int, block_bytes: int = BLOCK_BYTES) -> None:
        self._salt = salt & 0xFFFF_FFFF_FFFF_FFFF
        self._block_bytes = block_bytes
        self._conversations: OrderedDict[int, float] = OrderedDict()
        self._models: OrderedDict[tuple[str, str], float] = OrderedDict()

    def chain(self, request: ParsedRequest, *, isolation: str = "", cls: str = "") -> Chain:
        """Return the prompt's chain, its token count estimated."""
        stream = canonical(request, isolation=isolation)
        hashes = chain_bytes(stream, self._salt, self._block_bytes)
        size = len(stream)
        if _is_token_ids(request):
            ratio = ID_BYTES
        else:
            ratio = self._ratio(hashes, request.model or "", cls)
        return Chain(
            hashes=hashes,
            tokens_per_block=self._block_bytes / ratio,
            tokens=max(1, round(size / ratio)),
            text_bytes=size,
            narrow_blocks=narrow_blocks(self._block_bytes),
        )

    def learn(self, model: str, cls: str, chain: Chain, prompt_tokens: int) -> None:
        """Take in the prompt tokens an engine reported. `model` is the name the chain was made of.

        Nonsense (no tokens, no text) is ignored and a ratio is held to what text can have.
        """
        if prompt_tokens <= 0 or chain.text_bytes <= 0:
            return
        low, high = _RATIO_RANGE
        ratio = min(high, max(low, chain.text_bytes / prompt_tokens))
        for key in ((model, cls), (model, "")):
            _blend(self._models, key, ratio, _MODEL_WEIGHT, MAX_MODELS)
        for anchor in _ANCHORS:
            if anchor < len(chain.hashes):
                mark = chain.hashes[anchor]
                _blend(self._conversations, mark, ratio, _CONVERSATION_WEIGHT, MAX_CONVERSATIONS)

    def _ratio(self, hashes: "array[int]", model: str, cls: str) -> float:
        known = self._conversations
        size = len(hashes)
        for anchor in _ANCHORS:
            if anchor < size and (ratio := known.get(hashes[anchor])):
                return ratio
        return self._models.get((model, cls)) or self._models.get((model, "")) or DEFAULT_RATIO


def _blend(table: OrderedDict[Any, float], key: Any, ratio: float, weight: float, cap: int) -> None:
    """Move the entry towards `ratio` and make it the youngest; the oldest makes room."""
    old = table.get(key)
    table[key] = ratio if old is None else old + weight * (ratio - old)
    table.move_to_end(key)
    if len(table) > cap:
        table.popitem(last=False)


def _is_token_ids(request: ParsedRequest) -> bool:
    prompt = request.data.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return False
    first = prompt[0]
    return isinstance(first, int) or (isinstance(first, list) and "messages" not in request.data)
