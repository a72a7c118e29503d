"""Exact chains: a model's tokenizer and chat template behind the same protocol as byte blocks.

`chain` encodes on the caller's thread (1-3 MB/s where the prompt is new), so every encoding is
kept in a cache of bounded size. What cannot be rendered exactly falls back to byte blocks.
"""

from array import array
from collections import OrderedDict
from typing import Final

import xxhash
from tokenizers import Tokenizer

from gateway.core.chain import ID_BYTES, chain_tokens, token_seed
from gateway.core.prompter import Prompter
from gateway.core.request import ParsedRequest
from gateway.core.types import Api, Chain
from gateway.prompt.template import ChatTemplate, Unrenderable

MAX_TEXT_CHARS: Final = 1024 * 1024
"""Longer prompts are chained by bytes: encoding one would hold the caller up for half a second."""

CACHE_BYTES: Final = 64 * 1024 * 1024
_ENTRY_BYTES: Final = 200  # key, array header, table entry


class EncodingCache:
    """Text digest -> token ids, least recently used out first, bounded by bytes."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._table: OrderedDict[bytes, array[int]] = OrderedDict()

    def get(self, key: bytes) -> "array[int] | None":
        """Return the ids of a text, and make them the youngest."""
        ids = self._table.get(key)
        if ids is not None:
            self._table.move_to_end(key)
        return ids

    def put(self, key: bytes, ids: "array[int]") -> None:
        """Keep the ids; the oldest make room."""
        old = self._table.pop(key, None)
        if old is not None:
            self.bytes -= _size(old)
        self._table[key] = ids
        self.bytes += _size(ids)
        while self.bytes > self.max_bytes:
            self.bytes -= _size(self._table.popitem(last=False)[1])


class TokenPrompter:
    """Chains over token blocks. `matched` and `mismatched` count how often engines agreed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        fallback: Prompter,
        *,
        salt: int,
        block_tokens: int,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._fallback = fallback
        self._salt = salt & 0xFFFF_FFFF_FFFF_FFFF
        self._block_tokens = block_tokens
        self._cache = EncodingCache(cache_bytes)
        self.matched = 0
        self.mismatched = 0
        self.unrendered = 0

    def chain(self, request: ParsedRequest, *, isolation: str = "", cls: str = "") -> Chain:
        """Return the exact chain, or the fallback's where the prompt cannot be rendered."""
        try:
            ids = self._ids(request)
        except Unrenderable:
            self.unrendered += 1
            return self._fallback.chain(request, isolation=isolation, cls=cls)
        salt = request.data.get("cache_salt")
        seed = token_seed(
            self._salt,
            model=request.model or "",
            cache_salt="" if salt is None else str(salt),
            isolation=isolation,
        )
        return Chain(
            hashes=chain_tokens(ids, seed, self._block_tokens),
            tokens_per_block=self._block_tokens,
            tokens=len(ids),
            exact=True,
            text_bytes=len(ids) * ID_BYTES,
        )

    start = chain

    def learn(self, model: str, cls: str, chain: Chain, prompt_tokens: int) -> None:
        """Check an exact count against the engine's; pass an estimate on to the fallback."""
        if not chain.exact:
            self._fallback.learn(model, cls, chain, prompt_tokens)
        elif chain.tokens == prompt_tokens:
            self.matched += 1
        else:
            self.mismatched += 1

    def _ids(self, request: ParsedRequest) -> "array[int]":
        data = request.data
        if request.api is Api.CHAT or (request.api is Api.TOKENIZE and "messages" in data):
            if self._template is None:
                raise Unrenderable("the model has no chat template")
            text = self._template.render(data)
            return self._encode(text, special=bool(data.get("add_special_tokens", False)))
        if request.api in (Api.COMPLETIONS, Api.TOKENIZE):
            prompt = data.get("prompt")
            if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
                prompt = prompt[0]
            if isinstance(prompt, str) and not data.get("suffix"):
                return self._encode(prompt, special=bool(data.get("add_special_tokens", True)))
            return _given_ids(prompt)
        raise Unrenderable("no text prompt of this shape")

    def _encode(self, text: str, *, special: bool) -> "array[int]":
        if len(text) > MAX_TEXT_CHARS:
            raise Unrenderable("the prompt is too long to encode here")
        key = xxhash.xxh3_128_digest(text.encode(), seed=self._salt ^ special)
        ids = self._cache.get(key)
        if ids is None:
            encoding = self._tokenizer.encode(text, add_special_tokens=special)
            ids = array("I", encoding.ids)
            self._cache.put(key, ids)
        return ids


def _given_ids(prompt: object) -> "array[int]":
    if not isinstance(prompt, list) or not prompt:
        raise Unrenderable("no prompt, or several")
    try:
        return array("I", prompt)
    except (TypeError, OverflowError):
        raise Unrenderable("several prompts, or none") from None


def _size(ids: "array[int]") -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES
