"""Exact chains: a model's tokenizer and chat template behind the same protocol as byte blocks.

Every encoding is kept in a cache of bounded size. `start` leaves long new text to the encoder
pool; `chain` encodes on the caller's thread. What cannot be rendered exactly falls back to byte
blocks.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import xxhash

from gateway.core.chain import ID_BYTES, chain_tokens, token_seed
from gateway.core.prompter import PendingChain, Prompter
from gateway.core.request import ParsedRequest
from gateway.core.types import Api, Chain
from gateway.prompt.chat import conversation
from gateway.prompt.engines import CannotEncode, Encoder
from gateway.prompt.jobs import FAILED, EncodeJob
from gateway.prompt.pool import EncoderPool
from gateway.prompt.template import ChatTemplate, Unrenderable

MAX_TEXT_CHARS: Final = 1024 * 1024
"""Longer prompts are chained by bytes: encoding one would hold the caller up for half a second."""

CACHE_BYTES: Final = 64 * 1024 * 1024
_ENTRY_BYTES: Final = 200  # key, array header, table entry


class Text(NamedTuple):
    """A prompt to be encoded. `special` = with the special tokens that completions get."""

    text: str
    special: bool
    key: bytes


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
        encoder: Encoder,
        template: ChatTemplate | None,
        fallback: Prompter,
        *,
        salt: int,
        block_tokens: int,
        pool: EncoderPool | None = None,
        on_fallback: Callable[[str], None] = lambda _: None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._encoder = encoder
        self._pool = pool
        self._on_fallback = on_fallback
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
        chain = self._begin(request, isolation, cls, None)
        assert isinstance(chain, Chain)
        return chain

    def start(
        self, request: ParsedRequest, *, isolation: str = "", cls: str = ""
    ) -> Chain | PendingChain:
        """Return the same, or, where much is left to be encoded, a job for the pool."""
        return self._begin(request, isolation, cls, self._pool)

    def _begin(
        self, request: ParsedRequest, isolation: str, cls: str, pool: EncoderPool | None
    ) -> Chain | PendingChain:
        salt = request.data.get("cache_salt")
        seed = token_seed(
            self._salt,
            model=request.model or "",
            cache_salt="" if salt is None else str(salt),
            isolation=isolation,
        )
        by_bytes = partial(self._by_bytes, request, request.model, isolation, cls)
        encoder = self._encoder
        try:
            wanted = self._wanted(request)
            if not isinstance(wanted, Text):
                return self._exact(wanted, seed)
            ids = self._cache.get(wanted.key)
            if ids is not None:
                return self._exact(ids, seed)
            finish = partial(self._encoded, wanted, seed)
            if pool is not None and len(wanted.text) > encoder.inline_chars:
                return EncodeJob(pool, encoder, [wanted.text], finish, by_bytes)
            return finish([encoder.encode(wanted.text)])
        except Unrenderable:
            self.unrendered += 1
            return self._fallback.chain(request, isolation=isolation, cls=cls)
        except CannotEncode:
            return by_bytes(FAILED)

    def _encoded(self, wanted: "Text", seed: int, ids: "Sequence[array[int]]") -> Chain:
        """Keep what a text was encoded to and return its chain."""
        whole = self._encoder.wrap(ids[0]) if wanted.special else ids[0]
        self._cache.put(wanted.key, whole)
        return self._exact(whole, seed)

    def _exact(self, ids: "array[int]", seed: int) -> Chain:
        return Chain(
            hashes=chain_tokens(ids, seed, self._block_tokens),
            tokens_per_block=self._block_tokens,
            tokens=len(ids),
            exact=True,
            text_bytes=len(ids) * ID_BYTES,
        )

    def _by_bytes(
        self, request: ParsedRequest, model: str | None, isolation: str, cls: str, reason: str
    ) -> Chain:
        """Count why and return the fallback's chain, under the model's own name."""
        self._on_fallback(reason)
        asked, request.model = request.model, model
        try:
            return self._fallback.chain(request, isolation=isolation, cls=cls)
        finally:
            request.model = asked

    def learn(self, model: str, cls: str, chain: Chain, prompt_tokens: int) -> None:
        """Check an exact count against the engine's; pass an estimate on to the fallback."""
        if not chain.exact:
            self._fallback.learn(model, cls, chain, prompt_tokens)
        elif chain.tokens == prompt_tokens:
            self.matched += 1
        else:
            self.mismatched += 1

    def _wanted(self, request: ParsedRequest) -> "Text | array[int]":
        """Return the prompt as text to encode, or its ids where the client sent them."""
        data = request.data
        if request.api is Api.CHAT or (request.api is Api.TOKENIZE and "messages" in data):
            if self._template is None:
                raise Unrenderable("the model has no chat template")
            template = self._template
            text = template.render(
                conversation(
                    request,
                    merges_system=template.merges_system,
                    disabled_effort=template.disabled_effort,
                )
            )
            return self._text(text, special=bool(data.get("add_special_tokens", False)))
        if request.api in (Api.COMPLETIONS, Api.TOKENIZE):
            prompt = data.get("prompt")
            if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
                prompt = prompt[0]
            if isinstance(prompt, str) and not data.get("suffix"):
                return self._text(prompt, special=bool(data.get("add_special_tokens", True)))
            return _given_ids(prompt)
        raise Unrenderable("no text prompt of this shape")

    def _text(self, text: str, *, special: bool) -> "Text":
        if len(text) > MAX_TEXT_CHARS:
            raise Unrenderable("the prompt is too long to encode here")
        if special and not self._encoder.wraps:
            raise Unrenderable("special tokens are not added around the text")
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise Unrenderable("half a surrogate pair") from None
        return Text(text, special, xxhash.xxh3_128_digest(data, seed=self._salt ^ special))


def _given_ids(prompt: object) -> "array[int]":
    if not isinstance(prompt, list) or not prompt:
        raise Unrenderable("no prompt, or several")
    try:
        return array("I", prompt)
    except (TypeError, OverflowError):
        raise Unrenderable("several prompts, or none") from None


def _size(ids: "array[int]") -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES
