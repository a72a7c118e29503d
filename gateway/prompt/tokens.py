"""Exact chains: a model's tokenizer and chat template behind the same protocol as byte blocks.

A chat goes the short way where it can (`conversation.py`: its new messages alone), else it is
rendered and encoded whole. Every encoding is kept in a cache of bounded size. `start` leaves long
new text to the encoder pool; `chain` encodes on the caller's thread. What cannot be rendered
exactly falls back to byte blocks.
"""

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import xxhash

from gateway.core.answer import Said
from gateway.core.chain import ID_BYTES, chain_tokens, token_seed
from gateway.core.prompter import PendingChain, Prompter
from gateway.core.request import ParsedRequest
from gateway.core.types import Api, Chain
from gateway.prompt.amount import MAX_TEXT_CHARS
from gateway.prompt.chat import Conversation, conversation
from gateway.prompt.conversation import Chained, Conversations, Route
from gateway.prompt.engines import CannotEncode, Encoder
from gateway.prompt.jobs import FAILED, EncodeJob
from gateway.prompt.pool import EncoderPool
from gateway.prompt.template import ChatTemplate, Unrenderable

_log = logging.getLogger("radixgate.prompt")

CACHE_BYTES: Final = 64 * 1024 * 1024
_CUT_TOKENS: Final = 8
_ENTRY_BYTES: Final = 200  # key, array header, table entry


ByBytes = Callable[[str], Chain]
"""Gives a request's byte chain, and counts why."""

_CHAT_APIS: Final = frozenset({Api.CHAT, Api.MESSAGES, Api.COUNT_TOKENS, Api.RESPONSES})
_COMPLETION_APIS: Final = frozenset({Api.COMPLETIONS, Api.TOKENIZE})
_ODD_FIELDS: Final = ("suffix", "truncate_prompt_tokens", "prompt_embeds")


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
        conversations: Conversations | None = None,
    ) -> None:
        self._conversations = conversations
        self._encoder = encoder
        self._pool = pool
        self._on_fallback = on_fallback
        self._template = template
        self._fallback = fallback
        self._salt = salt & 0xFFFF_FFFF_FFFF_FFFF
        self._block_tokens = block_tokens
        self._model_block_tokens: dict[str, int] = {}
        self._cache = EncodingCache(cache_bytes)
        self._doubted = False
        self.matched = 0
        self.mismatched = 0
        self.unrendered = 0
        self.in_parts = 0
        """Chats that took the short way."""

    def block_tokens_of(self, model: str) -> int:
        """Return the tokens per block of a model's chains."""
        return self._model_block_tokens.get(model, self._block_tokens)

    def use_block_tokens(self, model: str, block_tokens: int) -> bool:
        """Chain a model's prompts by its engines' block size from now on; True = it is another.

        Chains of another block size have no hash in common: what was known by them is of no use.
        """
        if block_tokens < 1 or block_tokens == self.block_tokens_of(model):
            return False
        self._model_block_tokens[model] = block_tokens
        return True

    def cap_conversations(self, max_bytes: int) -> None:
        """Bound what is remembered of conversations, and of encoded texts, to so much each."""
        self._cache.max_bytes = max_bytes
        if self._conversations is not None:
            self._conversations.max_bytes = max_bytes

    def render_whole(self) -> None:
        """Give the short way up: every chat is rendered and encoded as a whole from now on."""
        self._conversations = None

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
        chained = self._chained(request, isolation)
        by_bytes = partial(self._by_bytes, request, request.model, isolation, cls)
        try:
            if not _is_chat(request):
                wanted = self._completion(request)
                if not isinstance(wanted, Text):
                    return self._exact(wanted, chained)
                return self._whole(wanted, chained, pool, by_bytes)
            chat = self._chat(request)
            special = bool(request.data.get("add_special_tokens", False))
            route = None if special else self._route(chat, chained)
            if route is None:
                assert self._template is not None
                wanted = self._text(self._template.render(chat), special=special)
                return self._whole(wanted, chained, pool, by_bytes)
            texts = [self._text(text, special=False) for text in route.texts]
            finish = partial(self._routed, route)
            if self._doubted and (whole := self._doubtful(chat)) is not None:
                texts.append(whole)
                finish = partial(self._compared, route, chained)
            return self._encoded(texts, finish, pool, by_bytes)
        except Unrenderable:
            self.unrendered += 1
            return self._fallback.chain(request, isolation=isolation, cls=cls)
        except CannotEncode:
            return by_bytes(FAILED)

    def _chained(self, request: ParsedRequest, isolation: str) -> Chained:
        model = request.model or ""
        salt = request.data.get("cache_salt")
        seed = token_seed(
            self._salt,
            model=model,
            cache_salt="" if salt is None else str(salt),
            isolation=isolation,
        )
        return Chained(seed, self.block_tokens_of(model))

    def _route(self, chat: Conversation, chained: Chained) -> Route | None:
        if self._conversations is None:
            return None
        try:
            return self._conversations.route(chat, chained)
        except Unrenderable:  # in parts; as a whole it may yet be
            return None

    def _whole(
        self, wanted: "Text", chained: Chained, pool: EncoderPool | None, by_bytes: "ByBytes"
    ) -> Chain | PendingChain:
        return self._encoded([wanted], lambda ids: self._exact(ids[0], chained), pool, by_bytes)

    def _encoded(
        self,
        texts: "Sequence[Text]",
        finish: "Callable[[Sequence[array[int]]], Chain]",
        pool: EncoderPool | None,
        by_bytes: "ByBytes",
    ) -> Chain | PendingChain:
        """Return what `finish` makes of the texts' ids: at once where little is not known yet."""
        encoder, cache = self._encoder, self._cache
        known = {text.key: cache.get(text.key) for text in texts}
        left = [text for text in texts if known[text.key] is None]
        most = encoder.inline_chars
        later = []
        for text in left:
            if pool is not None and len(text.text) > most:
                later.append(text)
            else:
                most -= len(text.text)
                known[text.key] = self._keep(text, encoder.encode(text.text))

        def made(encoded: "Sequence[array[int]]") -> Chain:
            for text, ids in zip(later, encoded, strict=True):
                known[text.key] = self._keep(text, ids)
            whole = [known[text.key] for text in texts]
            return finish([ids for ids in whole if ids is not None])

        if pool is None or not later:
            return made([])
        return EncodeJob(pool, encoder, [text.text for text in later], made, by_bytes)

    def _keep(self, text: "Text", ids: "array[int]") -> "array[int]":
        """Remember a text's ids, special tokens around them where they belong, and return them."""
        whole = self._encoder.wrap(ids) if text.special else ids
        self._cache.put(text.key, whole)
        return whole

    def _routed(self, route: Route, ids: "Sequence[array[int]]") -> Chain:
        self.in_parts += 1
        return route.finish(ids)

    def _doubtful(self, chat: Conversation) -> "Text | None":
        """Return the whole of a chat, to compare what its parts give; None = not with this one."""
        assert self._template is not None
        try:
            return self._text(self._template.render(chat), special=False)
        except Unrenderable:
            return None

    def _compared(self, route: Route, chained: Chained, ids: "Sequence[array[int]]") -> Chain:
        """Return the whole prompt's chain; where its parts give another, give the short way up.

        Asked for when an engine counted another number of tokens.
        """
        *parts, whole_ids = ids
        chain, whole = self._routed(route, parts), self._exact(whole_ids, chained)
        self._doubted = False
        if whole != chain:
            _log.error("the chat template is not what was proven: prompts are rendered whole now")
            self.render_whole()
        return whole

    def _exact(self, ids: "array[int]", chained: Chained) -> Chain:
        size = chained.block_tokens
        hashes = chain_tokens(ids, chained.seed, size)
        return Chain(
            hashes=hashes,
            tokens_per_block=size,
            tokens=len(ids),
            exact=True,
            text_bytes=len(ids) * ID_BYTES,
            tail=ids[len(hashes) * size :].tobytes(),
            link=hashes[-1] if hashes else chained.seed,
            block_bytes=size * ID_BYTES,
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

    def grow(self, chain: Chain, said: Said, sampled_tokens: int | None) -> "array[int] | None":
        """Return the hashes of the prompt and the answer's text after it; None = no block more.

        The next turn renders the answer where this prompt ends. Encoded here and now, so of a long
        one only the beginning counts, less the last tokens, which the cut may have changed. The token
        that was sampled last never went through the model, so its block is not complete.
        """
        if not chain.exact:
            return self._fallback.grow(chain, said, sampled_tokens)
        text = said.text()
        if not text or text[0].isspace():  # it may become one token with what is before it
            return None
        encoder, size = self._encoder, chain.block_bytes // ID_BYTES
        most = encoder.inline_chars
        try:
            ids = encoder.encode(text[:most])
        except CannotEncode:
            return None
        if len(text) > most:
            del ids[-_CUT_TOKENS:]
        if sampled_tokens:
            del ids[sampled_tokens - 1 :]
        open_end = array("I")
        open_end.frombytes(chain.tail)
        more = chain_tokens(open_end + ids, chain.link, size)
        return chain.hashes + more if more else None

    def learn(self, model: str, cls: str, chain: Chain, prompt_tokens: int) -> None:
        """Check an exact count against the engine's; pass an estimate on to the fallback."""
        if not chain.exact:
            self._fallback.learn(model, cls, chain, prompt_tokens)
        elif chain.tokens == prompt_tokens:
            self.matched += 1
        else:
            self.mismatched += 1
            # An engine with another template always differs: not every time is a check worth it.
            self._doubted = self.mismatched.bit_count() == 1

    def _chat(self, request: ParsedRequest) -> Conversation:
        template = self._template
        if template is None:
            raise Unrenderable("the model has no chat template")
        return conversation(
            request,
            merges_system=template.merges_system,
            disabled_effort=template.disabled_effort,
        )

    def _completion(self, request: ParsedRequest) -> "Text | array[int]":
        """Return the prompt as text to encode, or its ids where the client sent them."""
        data = request.data
        if request.api not in _COMPLETION_APIS or any(data.get(field) for field in _ODD_FIELDS):
            raise Unrenderable("no text prompt of this shape")
        prompt = data.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._text(prompt, special=bool(data.get("add_special_tokens", True)))
        return _given_ids(prompt)

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


def _is_chat(request: ParsedRequest) -> bool:
    api = request.api
    return api in _CHAT_APIS or (api is Api.TOKENIZE and "messages" in request.data)


def _given_ids(prompt: object) -> "array[int]":
    if not isinstance(prompt, list) or not prompt:
        raise Unrenderable("no prompt, or several")
    try:
        return array("I", prompt)
    except (TypeError, OverflowError):
        raise Unrenderable("several prompts, or none") from None


def _size(ids: "array[int]") -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES
