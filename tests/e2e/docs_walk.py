"""Runs what the documents tell users to type, against simulated replicas and a gateway of its own.

What is replaced: ports and addresses by those that are there, files that do not exist by ones that
do, and the size of simulations. What cannot be run here is named in `ELSEWHERE`, with the reason.
"""

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import yaml

from gateway.cli.main import COMMANDS, load_command, main
from tests.e2e.docs_kit import ROOT, Command
from tests.e2e.fleet import DEADLINE_S, Gateway, eventually, fetch, start_gateway

MODEL = "qwen3-coder"
ELSEWHERE = {
    "aider": "a client that is not installed with the tests",
    "caddy": "a proxy that is not installed with the tests",
    "claude": "a client that is not installed with the tests",
    "cline": "a client that is not installed with the tests",
    "codex": "a client that is not installed with the tests",
    "helm": "needs a cluster",
    "kill": "a signal to a process of the reader's",
    "nginx": "a proxy that is not installed with the tests",
    "node": "a client that is not installed with the tests",
    "npm": "downloads",
    "npx": "downloads",
    "open-webui": "a client that is not installed with the tests",
    "opencode": "a client that is not installed with the tests",
    "openssl": "makes certificates of the reader's names",
    "systemctl": "needs root",
    "vllm": "an engine: needs a GPU",
}
STEPS = frozenset(
    [
        "cat",
        "cd",
        "chmod",
        "cp",
        "echo",
        "export",
        "grep",
        "head",
        "jq",
        "less",
        "ls",
        "mkdir",
        "mv",
        "rm",
        "set",
        "sleep",
        "sort",
        "tail",
        "tee",
    ]
)
_LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})
_CONFIG = f"""\
models:
  - name: {MODEL}
    backends:
      - {{name: a, url: "URL-A"}}
      - {{name: b, url: "URL-B"}}
"""
AT_ONCE = ("--set", "timeouts.drain_delay_s=0")  # it ends when it is told to
_BODY = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
# curl's options by how many words they take; all others are a mistake of the document's.
_CURL = {"-H": 1, "--header": 1, "-d": 1, "--data": 1, "--data-binary": 1, "--json": 1, "-X": 1}
_CURL |= {"--request": 1, "-o": 1, "-w": 1, "-u": 1, "--max-time": 1, "--retry": 1}
_CURL |= dict.fromkeys(("-s", "-S", "-f", "-N", "-i", "-I", "-v", "-L", "-k", "-sS", "-fsS"), 0)
_CURL |= dict.fromkeys(("-sN", "-fs", "-sf", "--fail", "--silent", "--no-buffer"), 0)


class Unknown(AssertionError):
    """A command nobody can judge: mark its block, or teach the walk."""


@dataclass
class Walk:
    """The directory a reader is in, and what runs beside it. `done` remembers what has passed."""

    home: Path
    replicas: list[str]
    gateway: Gateway
    done: set[tuple[str, ...]] = field(default_factory=set)

    def run(self, command: Command) -> None:
        """Run a command or check it as far as it can be.

        Raises:
            Unknown: it is no command that is known here.
        """
        known: dict[str, Callable[[Command], None]] = {
            "radixgate": self._radixgate,
            "curl": self._curl,
            "docker": _docker,
            "kubectl": _kubectl,
            "locust": self._locust,
            "make": _make,
            "pip": _pip,
            "python": _python,
            "python3": _python,
        }
        mark = (*command.words, *sorted(command.variables))
        if mark in self.done or command.program in STEPS or command.program in ELSEWHERE:
            return
        judge = known.get(command.program)
        if judge is None:
            raise Unknown(f"{command.program}: what is it? {' '.join(command.words)[:100]}")
        judge(command)
        self.done.add(mark)

    def config(self, name: str) -> Path:
        """Return a file of this name in the reader's directory, written if it is not there."""
        path = self.home / name.lstrip("/")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            a, b = self.replicas[:2]
            path.write_text(_CONFIG.replace("URL-A", a).replace("URL-B", b), encoding="utf-8")
        return path

    # --- radixgate

    def _radixgate(self, command: Command) -> None:
        words = command.words[1:]
        assert words, "radixgate alone is bad usage"
        if words[0] == "--version":
            assert main(words) == 0
            return
        args = parse(words)
        runner = getattr(self, f"_{words[0]}", None)
        assert runner is not None, f"no walk for `radixgate {words[0]}`"
        runner(words, args)

    def _check(self, words: Sequence[str], args: argparse.Namespace) -> None:
        self._main([str(self.config(args.config)) if w == args.config else w for w in words])

    def _key(self, words: Sequence[str], _: argparse.Namespace) -> None:
        self._main(words)

    def _explain(self, words: Sequence[str], _: argparse.Namespace) -> None:
        request = self.home / "request.json"
        request.write_bytes(orjson.dumps(_BODY))
        files = [str(request) if Path(w).suffix == ".json" else w for w in words]
        self._main([*files, "--gateway", self.gateway.admin])

    def _top(self, words: Sequence[str], _: argparse.Namespace) -> None:
        self._main([*words, "--gateway", self.gateway.admin, "--once"])

    def _replay(self, words: Sequence[str], args: argparse.Namespace) -> None:
        self._main([*self._small(words, args.trace), "--requests", "60", "--jobs", "1"])

    def _tune(self, words: Sequence[str], args: argparse.Namespace) -> None:
        small = [*self._small(words, args.trace), "--requests", "60", "--jobs", "1"]
        if args.config is not None:
            small += ["--config", str(self.config(str(args.config)))]
        self._main([*small, "--trials", "1", "--seeds", "1"])

    def _demo(self, words: Sequence[str], _: argparse.Namespace) -> None:
        """Only parsed: it takes 10 s, and `test_sim_demo` runs it."""

    def _replica(self, words: Sequence[str], args: argparse.Namespace) -> None:
        port = ["--kv-events-port", "0"] if args.kv_events_port else []
        with replicas([*words[1:], "--port", "0", *port], args.count) as urls:
            assert [fetch(f"{url}/health").status for url in urls] == [200] * args.count

    def _serve(self, _: Sequence[str], args: argparse.Namespace) -> None:
        arguments = [] if args.config is None else [str(self.config(args.config))]
        for url in self.replicas[: len(args.backends)]:
            arguments += ["--backend", url]
        for override in args.overrides:
            key, _, value = override.partition("=")
            arguments += ["--set", f"{key}={self.home}{value}" if value[:1] == "/" else override]
        arguments += ["--policy", args.policy] if args.policy else []
        with start_gateway([*arguments, *AT_ONCE], self.home) as served:
            assert served.ready_line

    def _small(self, words: Sequence[str], trace: str) -> list[str]:
        """Return the words with a trace that is there, and without a search for a load."""
        if trace.startswith("synthetic:"):
            kept = list(words)
            while "--load" in kept:
                at = kept.index("--load")
                del kept[at : at + 2]
            return kept if "--rate" in kept else [*kept, "--rate", "20"]
        there = self.home / Path(trace).name
        if not there.exists():
            shutil.copy(ROOT / "tests" / "traces" / "mix.jsonl.gz", f"{there}.gz")
            there = Path(f"{there}.gz")
        return [str(there) if word == trace else word for word in words]

    def _main(self, words: Sequence[str]) -> None:
        before = Path.cwd()
        os.chdir(self.home)
        try:
            code = main(words)
        finally:
            os.chdir(before)
        assert code == 0, f"radixgate {' '.join(words)}: exit code {code}"

    # --- other programs

    def _curl(self, command: Command) -> None:
        """Send what curl would, if it is for this machine; a document's options must be curl's."""
        given, urls = _options(command.words[1:])
        assert len(urls) == 1, command.words
        parts = urlsplit(urls[0])
        if parts.scheme != "http" or parts.hostname not in _LOCAL:
            return  # another host, or TLS with certificates of the reader's
        base = self.gateway.admin if parts.port == 9090 else self.gateway.url
        assert parts.port in {8080, 9090}, f"who listens at {urls[0]}?"
        bodies = [v for k, v in given if k in {"-d", "--data", "--data-binary", "--json"}]
        body = None
        if bodies:
            body = _BODY if bodies[0][:1] == "@" else orjson.loads(bodies[0])
            body = {**body, "model": MODEL}
        methods = [v for k, v in given if k in {"-X", "--request"}]
        method = methods[0] if methods else "GET" if body is None else "POST"
        query = f"?{parts.query}" if parts.query else ""
        answer = fetch(f"{base}{parts.path}{query}", method=method, body=body)
        assert answer.status < 400, f"{urls[0]}: {answer.status} {answer.body!r}"

    def _locust(self, command: Command) -> None:
        file = command.words[command.words.index("-f") + 1]
        assert (ROOT / file).is_file(), file


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return a radixgate command's arguments; its parser ends the test if they are wrong."""
    return parser_of(words[0]).parse_args(words[1:])


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a radixgate command."""
    assert command in COMMANDS, f"no command `radixgate {command}`"
    parser = argparse.ArgumentParser(prog=f"radixgate {command}")
    load_command(command).add_arguments(parser)
    return parser


@contextmanager
def replicas(arguments: Sequence[str], count: int) -> Iterator[list[str]]:
    """Run `radixgate replica`; yield the URLs it prints."""
    argv = [sys.executable, "-m", "gateway.cli.main", "replica", *arguments]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [process.stdout.readline().split()[-1] for _ in range(count)]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0


def wait_until_ready(gateway: Gateway) -> None:
    """Return when a gateway has a backend that is up."""
    eventually(lambda: fetch(f"{gateway.url}/readyz").status == 200, what="a backend that is up")


@contextmanager
def walk(home: Path) -> Iterator[Walk]:
    """Begin a walk: two replicas, and a gateway in front of them."""
    for name in ("config", "loadtest"):
        (home / name).symlink_to(ROOT / name)
    with replicas(["--port", "0", "--count", "2", "--model", MODEL], 2) as urls:
        file = home / "walk.yaml"
        text = _CONFIG.replace("URL-A", urls[0]).replace("URL-B", urls[1])
        file.write_text(text, encoding="utf-8")
        with start_gateway([str(file), *AT_ONCE], home) as gateway:
            wait_until_ready(gateway)
            yield Walk(home, urls, gateway)


def _options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (options with their values, what is left) of a curl command."""
    given: list[tuple[str, str]] = []
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        if word[:1] != "-":
            left.append(word)
            continue
        assert word in _CURL, f"curl {word}: not one of its options that are known here"
        given.append((word, next(rest) if _CURL[word] else ""))
    return given, left


def _docker(command: Command) -> None:
    """Check a compose command against the file; nothing is started."""
    words = command.words[1:]
    if words[:1] != ["compose"]:
        return  # an image of the reader's
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    profiles = {name for service in services.values() for name in service.get("profiles", ())}
    asked = [after for word, after in pairwise(words) if word == "--profile"]
    assert set(asked) <= profiles, f"profiles are {sorted(profiles)}"
    if "up" in words:
        named = [word for word in words[words.index("up") + 1 :] if word[:1] != "-"]
        assert set(named) <= set(services), f"services are {sorted(services)}"


def _kubectl(command: Command) -> None:
    """Check that the files it is given are there."""
    words = command.words
    for word, after in pairwise(words):
        if word in {"-f", "-k"} and "://" not in after and after != "-":
            assert (ROOT / after).exists(), after


def _make(command: Command) -> None:
    """Have make say what it would do."""
    argv = ["make", "--no-print-directory", "-n", *command.words[1:]]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _pip(command: Command) -> None:
    """Check that extras of this project exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in command.words:
        match = re.fullmatch(r"(?:\.|radixgate)\[([\w,-]+)\]", word)
        named = set(match[1].split(",")) if match else set()
        assert named <= set(project["optional-dependencies"]), word


def _python(command: Command) -> None:
    """Check that a module that is to be run exists."""
    words = command.words
    if "-m" in words:
        module = words[words.index("-m") + 1]
        if module == "pip":
            _pip(command)
        assert importlib.util.find_spec(module) is not None, module
    elif words[1:] and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), words[1]
