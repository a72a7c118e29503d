"""How fast each tokenizer library encodes on this machine, side by side, and whether it is exact.

    python -m loadtest.bench_tokens [--tokenizer FILE] [--mb 1] [--rounds 3]

Texts are the standard library's sources and prose made of their words; no library has seen one
before its `again` column. Megabytes per second of CPU time, the best of all rounds. Libraries that
are not installed are left out; those that the product does not use are shown for comparison.
"""

import argparse
import random
import sysconfig
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from gateway.prompt.engines import CANDIDATES, NotUsable
from gateway.prompt.reference import Reference, to_array
from loadtest.tokens_check import make_model

Encode = Callable[[str], "array[int]"]
_SEED: Final = 4
_BEAT_S: Final = 0.0005


def sources(chars: int) -> str:
    """Return that much code."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if chars <= 0:
            break
        text = path.read_text(encoding="utf-8", errors="ignore")[:chars]
        chars -= len(text)
        texts.append(text)
    return "".join(texts)


def prose(code: str, chars: int) -> str:
    """Return that much text of words as frequent as in natural language, some of them unique."""
    rng = random.Random(_SEED)
    words = sorted({word for word in code.split() if word.isalpha()})
    rng.shuffle(words)
    weights = [1 / (place + 10) for place in range(len(words))]
    made, length = [], 0
    while length < chars:
        for word in rng.choices(words, weights, k=1_000):
            made.append(word if rng.random() > 0.02 else f"{word}{rng.randrange(10**6)},")
            length += len(made[-1]) + 1
    return " ".join(made)[:chars]


def _kitoken(reference: Reference) -> Encode:
    from kitoken import Kitoken  # noqa: PLC0415 - for comparison only

    encoder = Kitoken.from_tokenizers(reference.json.encode())
    return lambda text: to_array(encoder.encode(text, True))


def _gigatoken(reference: Reference) -> Encode:
    from gigatoken import Tokenizer  # noqa: PLC0415 - for comparison only

    encoder = Tokenizer.from_json(reference.json)

    def encode(text: str) -> "array[int]":
        ids = array("I")
        ids.frombytes(encoder.encode(text).tobytes())
        return ids

    return encode


LIBRARIES: Final[dict[str, Callable[[Reference], Encode]]] = {
    "tokenizers": lambda reference: reference.encode,
    **CANDIDATES,
    "kitoken": _kitoken,
    "gigatoken": _gigatoken,
}


def pieces(text: str, size: int = 64 * 1024) -> Iterator[str]:
    """Yield prompts of a usual size."""
    for at in range(0, len(text), size):
        yield text[at : at + size]


def seconds(encode: Encode, text: str) -> float:
    """Return the CPU time that one pass takes: a busy machine changes little of it."""
    begun = time.process_time()
    for piece in pieces(text):
        encode(piece)
    return time.process_time() - begun


def stall_ms(encode: Encode, text: str) -> float:
    """Return the longest that another thread had to wait while one whole text was encoded."""
    done = threading.Event()

    def work() -> None:
        encode(text)
        done.set()

    thread = threading.Thread(target=work)
    worst, last = 0.0, time.perf_counter()
    thread.start()
    while not done.is_set():
        time.sleep(_BEAT_S)
        now = time.perf_counter()
        worst, last = max(worst, now - last - _BEAT_S), now
    thread.join()
    return worst * 1e3


def row(name: str, make: Any, reference: Reference, texts: dict[str, str], rounds: int) -> str:
    """Measure one library; every round makes it anew, so that its caches are empty again."""
    first: dict[str, float] = {}
    again: dict[str, float] = {}
    exact, stall = True, float("inf")
    for _ in range(rounds):
        encode = make(reference)
        for kind, text in texts.items():
            first[kind] = min(first.get(kind, 9e9), seconds(encode, text))
            again[kind] = min(again.get(kind, 9e9), seconds(encode, text))
        stall = min(stall, stall_ms(encode, "".join(texts.values())))
    encode = make(reference)
    for text in texts.values():
        exact = exact and all(encode(part) == reference.encode(part) for part in pieces(text))
    rates = "".join(
        f"{len(text) / first[kind] / 1e6:10.1f}{len(text) / again[kind] / 1e6:10.1f}"
        for kind, text in texts.items()
    )
    return f"{name:12}{rates}{stall:12.1f}   {'yes' if exact else 'NO'}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; else a small one is made")
    parser.add_argument("--mb", type=float, default=1.0, help="of each kind of text")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    chars = int(asked.mb * 1e6)
    code = sources(chars)
    texts = {"code": code, "prose": prose(code, chars)}
    with tempfile.TemporaryDirectory() as made:
        file = asked.tokenizer or make_model("qwen2", Path(made))[0] / "tokenizer.json"
        reference = Reference(file)
    print(f"{'MB/s':12}" + "".join(f"{kind:>10}{'again':>10}" for kind in texts), end="")
    print(f"{'stall ms':>12}   exact")
    for name, make in LIBRARIES.items():
        try:
            print(row(name, make, reference, texts, asked.rounds), flush=True)
        except ImportError:
            print(f"{name:12}  not installed")
        except NotUsable as reason:
            print(f"{name:12}  cannot take it: {reason}")


if __name__ == "__main__":
    main()
