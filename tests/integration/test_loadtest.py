"""The Locust file runs headless and reports what its rows claim."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest

ROOT = Path(__file__).resolve().parents[2]
WHOLE = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"one "}}]}\n\n',
    b": keep-alive\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"two "}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"three"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
]
BROKEN = [*WHOLE[:4], b'data: {"error":{"message":"gone","code":"upstream_error"}}\n\n', WHOLE[-1]]
CUT = WHOLE[:4]


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers every chat request with one scripted stream and remembers the bodies."""

    protocol_version = "HTTP/1.1"
    stream: ClassVar[list[bytes]] = WHOLE
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        body = b'{"object":"list","data":[{"id":"scripted"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        type(self).bodies.append(orjson.loads(body))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in [*self.stream, b""]:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the base class's name
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    """Takes all users' connections at once."""

    request_queue_size = 64


@contextmanager
def scripted(stream: list[bytes]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []
    handler = type("Handler", (Scripted,), {"stream": stream, "bodies": bodies})
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()


Rows = dict[tuple[str, str], dict[str, Any]]


def run_locust(host: str, *, seconds: int) -> tuple[int, Rows]:
    """Run the file for some seconds; return the exit code and Locust's rows by method and name."""
    argv = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py")]
    argv += ["--headless", "-u", "8", "-r", "8", "-t", f"{seconds}s", "--stop-timeout", "20"]
    argv += ["--host", host, "--json", "--coding-words", "300", "--answer-tokens", "8"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)  # pytest shows it when a test fails: it has the reasons
    start = done.stdout.index("[")
    rows = orjson.loads(done.stdout[start : done.stdout.rindex("]") + 1])
    return done.returncode, {(row["method"], row["name"]): row for row in rows}


@dataclass
class Run:
    """What one run sent and reported."""

    code: int
    rows: Rows
    bodies: list[dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Run:
    with scripted(WHOLE) as (host, bodies):
        code, rows = run_locust(host, seconds=4)
    return Run(code, rows, bodies)


def test_users_of_both_kinds_stream_and_report_ttft_and_itl(run: Run) -> None:
    assert run.code == 0
    for name in ("coding", "chat"):
        asked = run.rows["POST", name]["num_requests"]
        assert asked > 0
        assert run.rows["POST", name]["num_failures"] == 0
        assert run.rows["TTFT", name]["num_requests"] == asked
        assert run.rows["ITL", name]["num_requests"] == 2 * asked
        first = run.rows["TTFT", name]["total_response_time"]
        assert run.rows["POST", name]["total_response_time"] >= first
    assert all(body["stream"] and body["model"] == "scripted" for body in run.bodies)
    assert {"tools" in body for body in run.bodies} == {True, False}


def test_a_second_turn_repeats_the_first_word_for_word(run: Run) -> None:
    texts = [[m["content"] for m in body["messages"]] for body in run.bodies]
    second = [text for text in texts if len(text) == 4]
    assert second
    for text in second:
        assert text[2] == "one two three"
        assert text[:2] in texts


@pytest.mark.parametrize("stream", [BROKEN, CUT], ids=["error event", "no end"])
def test_a_stream_that_did_not_end_well_is_a_failure(stream: list[bytes]) -> None:
    with scripted(stream) as (host, _):
        code, rows = run_locust(host, seconds=1)

    assert code == 1
    for name in ("coding", "chat"):
        row = rows["POST", name]
        assert row["num_failures"] == row["num_requests"] > 0
