"""Small tokenizers of the kinds that models ship, trained here: nothing is downloaded."""

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
KINDS = ("qwen", "llama3", "gpt2", "metaspace")
EXTRA = (
    "日本語のテキスト 한국어 문장 добрый день e\u0301 é naïve 🙂👍🏾 1234567 the then there\n" * 20
)


def sources(limit_chars: int = 400_000) -> Iterator[str]:
    """Yield sources of the standard library, in a fixed order, up to a size; then other scripts."""
    used = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        used += len(text)
        if used > limit_chars:
            break
        yield text
    yield EXTRA


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def _byte_level(split: str | None, *, nfc: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = plain
    if split is not None:
        first = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, plain])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4_000,
        special_tokens=[special(text) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


def _qwen() -> Tokenizer:
    return _byte_level(QWEN_SPLIT, nfc=True)


def _llama3() -> Tokenizer:
    tokenizer = _byte_level(LLAMA_SPLIT)
    begin = SPECIALS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return tokenizer


def _gpt2() -> Tokenizer:
    return _byte_level(None)


def _metaspace() -> Tokenizer:
    """Return one as SentencePiece models are converted: no bytes before BPE, spaces as letters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=2_000, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(
        (line for text in sources(100_000) for line in text.split("\n")), trainer
    )
    return tokenizer


@cache
def tokenizer_json(kind: str) -> str:
    """Return a `tokenizer.json` of one of `KINDS`; trained once per process."""
    makers = {"qwen": _qwen, "llama3": _llama3, "gpt2": _gpt2, "metaspace": _metaspace}
    text: str = makers[kind]().to_str()
    return text


def write_tokenizer(kind: str, directory: Path) -> Path:
    """Write `tokenizer.json` and return its path."""
    file = directory / "tokenizer.json"
    file.write_text(tokenizer_json(kind), encoding="utf-8")
    return file
