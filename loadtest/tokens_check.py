"""Our token ids beside a real engine's own, over a golden set of conversations.

    python -m loadtest.tokens_check --url http://ENGINE:8000 --model ID --tokenizer MODEL_DIR
    python -m loadtest.tokens_check --start llamacpp [--start vllm] [--vllm-python PYTHON]

`--start` makes two tiny models (GPT-2's and Qwen2's way of splitting, a plain and a rich template)
and starts the engine on each. Every conversation is asked for when it is new, and by another prompter
with all its earlier turns known. Exits 1 on any difference and on any prompt that is not rendered.
"""

import argparse
import http.client
import os
import signal
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from gateway.core.chain import chain_tokens, token_seed
from gateway.core.prompter import BytePrompter, Prompter
from gateway.core.request import parse_json
from gateway.core.types import Api
from gateway.prompt.load import load_prompter

ROOT: Final = Path(__file__).resolve().parents[1]
GOLDEN: Final = ROOT / "tests" / "golden"
ENGINES: Final = ROOT / "tests" / "engines"
MODEL: Final = "tiny"
KINDS: Final = {"gpt2": [], "qwen2": ["--template", str(GOLDEN / "chat_template.jinja")]}
"""How each tiny model is made."""

_SALT: Final = 1
_SHOWN: Final = 6  # ids around the first difference
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Case:
    """A request body: a conversation or a prompt. Without `engines` it is for all of them."""

    name: str
    body: dict[str, Any]
    engines: tuple[str, ...] = ()

    @property
    def api(self) -> Api:
        """Return the route it is for."""
        return Api.CHAT if "messages" in self.body else Api.COMPLETIONS


class EngineRefused(Exception):
    """The engine does not tokenize this. The message is its answer."""


def load_cases(file: Path = GOLDEN / "conversations.json") -> list[Case]:
    """Return the golden set."""
    return [
        Case(row["name"], row["body"], tuple(row.get("engines", ())))
        for row in orjson.loads(file.read_bytes())
    ]


def engine_ids(engine: str, url: str, case: Case, model: str = MODEL) -> "array[int]":
    """Return the ids the engine makes of a case.

    Raises:
        EngineRefused: it answered with an error.
    """
    body = case.body
    if engine == "vllm":
        asked = {"model": model, **body}
    elif "messages" in body:  # llama.cpp renders and tokenizes on two routes
        options = {"enable_thinking": True} | body.get("chat_template_kwargs", {})  # else: false
        text = _post(url + "/apply-template", {**body, "chat_template_kwargs": options})["prompt"]
        asked = {"content": text, "add_special": False, "parse_special": True}
    else:
        asked = {"content": body["prompt"], "add_special": True, "parse_special": True}
    return array("I", _post(url + "/tokenize", asked)["tokens"])


def difference(prompter: Prompter, case: Case, ids: "array[int]") -> str | None:
    """Return how our ids differ from the engine's; None if they do not.

    `prompter` must have blocks of one token.
    """
    request = parse_json(case.api, orjson.dumps({"model": MODEL, **case.body}))
    chain = prompter.chain(request)
    if not chain.exact:
        return "was routed by bytes"
    expected = chain_tokens(ids, token_seed(_SALT, model=MODEL), 1)
    if chain.hashes == expected:
        return None
    pairs = zip(chain.hashes, expected, strict=False)
    at = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    where = min(len(expected), len(chain.hashes)) if at is None else at
    near = ids[max(0, where - _SHOWN) : where + _SHOWN].tolist()
    return f"{chain.tokens} tokens, the engine has {len(ids)}; token {where} differs, its {near}"


def compare(
    engine: str, url: str, tokenizer: Path, cases: Sequence[Case], model: str = MODEL
) -> Iterator[str]:
    """Yield one line per difference, for the cases this engine is asked."""
    states = {
        state: load_prompter(tokenizer, _SALT, BytePrompter(_SALT), block_tokens=1)
        for state in ("new", "with its turns known")
    }
    for case in cases:
        if case.engines and engine not in case.engines:
            continue
        try:
            ids = engine_ids(engine, url, case, model)
        except EngineRefused as error:
            yield f"{case.name}: the engine refused it: {error}"
            continue
        for state, prompter in states.items():
            if state != "new":
                _tell_turns(prompter, case)
            found = difference(prompter, case, ids)
            if found is not None:
                yield f"{case.name} ({state}): {found}"


def _tell_turns(prompter: Prompter, case: Case) -> None:
    """Ask for every earlier turn, as a client would have."""
    messages = case.body.get("messages", [])
    options = {
        name: value
        for name, value in case.body.items()
        if name not in {"continue_final_message", "add_generation_prompt"}
    }
    for turns in range(1, len(messages)):
        body = {"model": MODEL, **options, "messages": messages[:turns]}
        prompter.chain(parse_json(Api.CHAT, orjson.dumps(body)))


def _post(url: str, body: Any) -> Any:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", parts.path, orjson.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise EngineRefused(f"{answer.status} {data[:200]!r}")
    return orjson.loads(data)


def make_model(kind: str, directory: Path) -> tuple[Path, Path]:
    """Make one of `KINDS` and return its directory and its GGUF file."""
    made = directory / kind
    argv = [sys.executable, str(ENGINES / "make_tiny_model.py"), "--kind", kind, *KINDS[kind]]
    argv += ["--out", str(made), "--gguf", str(made.with_suffix(".gguf"))]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return made, made.with_suffix(".gguf")


@contextmanager
def running(engine: str, python: str, model: Path, logs: Path) -> Iterator[str]:
    """Run one engine and yield its URL."""
    argv = [sys.executable, str(ENGINES / "run_replicas.py"), "--engine", engine, "--count", "1"]
    argv += ["--bin", python, "--model", str(model), "--log-dir", str(logs)]
    argv += ["--timeout", "600"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if ready[:1] != ["READY"]:
            raise SystemExit(f"{engine} did not start; its log is in {logs}")
        yield ready[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def check(engine: str, url: str, tokenizer: Path, what: str, model: str = MODEL) -> int:
    """Compare, print, and return the number of differences."""
    cases = load_cases()
    found = list(compare(engine, url, tokenizer, cases, model))
    asked = sum(not case.engines or engine in case.engines for case in cases)
    print(f"{what}: {asked} prompts, {len(found)} differences")
    for line in found:
        print("  " + line)
    return len(found)


def main() -> None:
    """Check what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", action="append", choices=["llamacpp", "vllm"], default=[])
    parser.add_argument("--vllm-python", default=os.environ.get("E2E_VLLM_PYTHON", ""))
    parser.add_argument("--url", help="an engine that runs already")
    parser.add_argument("--model", default=MODEL, help="what that engine calls it")
    parser.add_argument("--engine", choices=["llamacpp", "vllm"], default="vllm")
    parser.add_argument("--tokenizer", type=Path, help="its tokenizer.json, or the directory")
    asked = parser.parse_args()
    if bool(asked.url) != bool(asked.tokenizer) or not (asked.url or asked.start):
        parser.error("give --url and --tokenizer, or --start")
    different = 0
    if asked.url:
        different += check(
            asked.engine, asked.url.rstrip("/"), asked.tokenizer, asked.url, asked.model
        )
    with tempfile.TemporaryDirectory() as made:
        for kind in KINDS if asked.start else ():
            directory, gguf = make_model(kind, Path(made))
            for engine in asked.start:
                python = asked.vllm_python if engine == "vllm" else sys.executable
                model = directory if engine == "vllm" else gguf
                with running(engine, python, model, Path(made)) as url:
                    different += check(engine, url, directory, f"{engine}, {kind}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
