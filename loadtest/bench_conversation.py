"""What the next turn of a known conversation costs, beside the budgets: `python -m loadtest.bench_conversation`.

Conversations of `--kb` in `--turns` turns go on by an answer and a question, `--new` bytes together;
every request is new but for its past, as a client would send it. CPU time of every single step;
p50 and p99 over the requests, of each the least of `--rounds` rounds, because a busy machine only
ever adds. The tokenizer is one trained here (`--tokenizer DIR` takes a real one), the template has the
habits of Qwen3's. `whole` is the same conversation by the whole-prompt path, `bytes` by byte blocks.
Prints figures, judges nothing.
"""

import argparse
import gc
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import thread_time_ns
from typing import Any, Final

import orjson

from gateway.core.dispatcher import Dispatcher
from gateway.core.prompter import BytePrompter, Prompter
from gateway.core.request import parse_json
from gateway.core.types import Api, Chain, Finish, Outcome, Ticket, Usage
from gateway.edge.query import build_query
from gateway.prompt.load import load_prompter
from gateway.prompt.tokens import TokenPrompter
from loadtest.bench_decide import settings
from loadtest.bench_tokens import prose, sources

_MAKER: Final = Path(__file__).parent.parent / "tests" / "engines" / "make_tiny_model.py"
_MESSAGE_CHARS: Final = 700
_NEXT: Final = 4
_MODEL: Final = "m"
TEMPLATE: Final = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(looking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool_response>')
                 and message.content.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set text = message.content %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def texts() -> Iterator[str]:
    """Yield texts of a message's length, half of them code, none of them twice."""
    code = sources(3_000_000)
    kinds = (code, prose(code, 3_000_000))
    for start in range(0, len(code), _MESSAGE_CHARS):
        for kind in kinds:
            yield kind[start : start + _MESSAGE_CHARS]


def begun(source: Iterator[str], size: int, turns: int) -> list[dict[str, Any]]:
    """Return a conversation of so many turns and bytes that a question ends."""
    messages = [{"role": "system", "content": next(source) * 4}]
    each = max(1, (size - 4 * _MESSAGE_CHARS) // (2 * turns))
    for turn in range(2 * turns - 1):
        text = "".join(next(source) for _ in range(-(-each // _MESSAGE_CHARS)))[:each]
        messages.append({"role": ("user", "assistant")[turn % 2], "content": text})
    return messages


def bodies(source: Iterator[str], size: int, turns: int, new: int) -> list[bytes]:
    """Return the conversation, then its next turns of `new` bytes each."""
    messages = begun(source, size, turns)
    made = []
    for _ in range(_NEXT + 1):
        made.append(orjson.dumps({"model": _MODEL, "stream": True, "messages": messages}))
        answer, question = next(source), next(source)
        half = new // 2
        messages += [
            {"role": "assistant", "content": answer[:half]},
            {"role": "user", "content": question[:half]},
        ]
    return made


class Figures:
    """Microseconds of each step of each request."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {}

    def timed(self, step: str, work: Callable[[], Any]) -> Any:
        """Return what the work returns."""
        start = thread_time_ns()
        result = work()
        self.took.setdefault(step, []).append((thread_time_ns() - start) / 1e3)
        return result

    def least(self, other: "Figures | None") -> "Figures":
        """Return the lesser of two runs' figures, request by request."""
        made = Figures()
        for step, took in self.took.items():
            made.took[step] = took if other is None else [*map(min, took, other.took[step])]
        return made

    def all_of(self) -> dict[str, tuple[float, float]]:
        """Return p50 and p99 of each step and, under "decision", of their sum."""
        sums = [sum(took) for took in zip(*self.took.values(), strict=True)]
        return {
            step: (statistics.median(took), sorted(took)[int(len(took) * 0.99)])
            for step, took in {**self.took, "decision": sums}.items()
        }


def run(prompter: Prompter, asked: list[list[bytes]]) -> Figures:
    """Return what each step costs for every request but each conversation's first."""
    core = Dispatcher(settings(8, "cost"), random.Random(1), 0.0)
    gc.collect()
    gc.disable()  # as in the gateway, which collects between requests
    figures, now = Figures(), 0.0
    for number, body in enumerate(turn for turns in zip(*asked, strict=True) for turn in turns):
        if number == len(asked):
            figures = Figures()
        now += 0.02
        parsed = figures.timed("parse", partial(parse_json, Api.CHAT, body))
        chain: Chain = figures.timed("chain", partial(prompter.chain, parsed))
        asking = partial(build_query, core, chain, parsed, _MODEL, path=Api.CHAT.value)
        query = figures.timed("query", asking)
        ticket: Ticket = figures.timed("admit", partial(core.admit, query, now))
        usage = Usage(chain.tokens, 100, ticket.hit_tokens)
        core.first_token(ticket, now + 0.005)
        core.finish(ticket, Finish(Outcome.OK, True, usage, 100), now + 0.01)
        prompter.learn(_MODEL, "chat", chain, chain.tokens)
    gc.enable()
    return figures


def best(
    make: Callable[[], Prompter], asked: list[list[bytes]], rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the figures of each request's cheapest round."""
    least: Figures | None = None
    for _ in range(rounds):
        least = run(make(), asked).least(least)
    return {} if least is None else least.all_of()


def show(name: str, found: dict[str, tuple[float, float]], bars: dict[str, str]) -> None:
    """Print a block of the table."""
    for step, (middle, last) in found.items():
        bar = bars.get(step, "")
        print(f"{name:<8} {step:<9} {middle:>9.1f} us  p99 {last:>9.1f} us  {bar}")


def model(directory: Path) -> Path:
    """Train a small tokenizer, give it the template, and return its directory."""
    subprocess.run(
        [sys.executable, str(_MAKER), "--out", str(directory)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


def whole(path: Path) -> TokenPrompter:
    """Return a prompter without the conversation cache."""
    prompter = load_prompter(path, 1, BytePrompter(1))
    prompter.render_whole()
    return prompter


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kb", type=int, default=128)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument(
        "--new", type=int, default=_MESSAGE_CHARS, help="bytes of a turn's messages"
    )
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    source = texts()
    asked = [
        bodies(source, options.kb * 1024, options.turns, options.new)
        for _ in range(options.conversations)
    ]
    sizes = f"{len(asked[0][1]) / 1024:.0f} to {len(asked[0][-1]) / 1024:.0f} KB"
    print(f"{options.conversations} conversations of {sizes}, {options.new} bytes of it new")
    with tempfile.TemporaryDirectory() as place:
        path = options.tokenizer or model(Path(place) / "model")
        made: dict[str, Callable[[], Prompter]] = {
            "parts": lambda: load_prompter(path, 1, BytePrompter(1)),
            "bytes": lambda: BytePrompter(1),
            "whole": lambda: whole(path),
        }
        bars = {
            "parts": {"chain": "<= 200 us", "decision": "<= 500 us p99"},
            "bytes": {"chain": "<= 150 us"},
        }
        for name, make in made.items():
            few = asked[:3] if name == "whole" else asked
            show(
                name, best(make, few, 1 if name == "whole" else options.rounds), bars.get(name, {})
            )


if __name__ == "__main__":
    main()
