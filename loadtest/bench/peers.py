"""Starts the proxies that are compared, each pinned to one core; a missing one is skipped."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gateway.sim.ports import free_port

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "bench"
READY_S = 40.0

_NGINX = """
worker_processes 1; daemon off; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_body_buffer_size 1m; client_max_body_size 64m;
  client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/f;
  uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s; keepalive_requests 1000000;
  upstream up {{ {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{port} backlog=8192;
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s; }} }}
}}
"""
_HAPROXY = """
global
  maxconn 8000
  nbthread 1
defaults
  mode http
  timeout connect 2s
  timeout client 600s
  timeout server 600s
  option http-keep-alive
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
  http-reuse always
{servers}
"""


@dataclass
class Peer:
    """A running proxy."""

    name: str
    port: int
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process and its children, all threads."""
        return sum(_cpu_ns(pid) for pid in _tree(self.process.pid)) / 1e9

    def rss_bytes(self) -> int:
        """Return the resident memory of the process tree."""
        page = os.sysconf("SC_PAGE_SIZE")
        total = 0
        for pid in _tree(self.process.pid):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        return total

    def stop(self) -> None:
        """End the proxy."""
        with_group = os.getpgid(self.process.pid)
        os.killpg(with_group, signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(with_group, signal.SIGKILL)
            self.process.wait(5)


def start(name: str, upstreams: list[int], core: int) -> Peer | None:
    """Start one proxy in front of the upstreams; None (and a word) when it is not to be had."""
    port = free_port()
    command = _COMMANDS[name](port, upstreams)
    if command is None:
        print(f"skipped {name}: not installed", file=sys.stderr)
        return None
    return spawn(name, command, port, core)


def spawn(name: str, command: list[str], port: int, core: int) -> Peer | None:
    """Start a command that will listen on `port`, pinned to `core`."""
    log = tempfile.NamedTemporaryFile(prefix=f"bench-{name}-", suffix=".log", delete=False)  # noqa: SIM115
    process = subprocess.Popen(
        [shutil.which("taskset") or "/usr/bin/taskset", "-c", str(core), *command],
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        cwd=ROOT,
    )
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return Peer(name, port, process)
        time.sleep(0.05)
    print(f"skipped {name}: did not start, see {log.name}", file=sys.stderr)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return None


def _urls(upstreams: list[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in upstreams]


def _nginx(port: int, upstreams: list[int]) -> list[str] | None:
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="bench-nginx-"))
    servers = " ".join(f"server 127.0.0.1:{up};" for up in upstreams)
    text = _NGINX.format(dir=folder, servers=servers, port=port)
    (folder / "nginx.conf").write_text(text)
    return [binary, "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def _haproxy(port: int, upstreams: list[int]) -> list[str] | None:
    binary = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if binary is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="bench-haproxy-"))
    servers = "\n".join(f"  server s{up} 127.0.0.1:{up}" for up in upstreams)
    (folder / "haproxy.cfg").write_text(_HAPROXY.format(servers=servers, port=port))
    return [binary, "-db", "-f", str(folder / "haproxy.cfg")]


def _radixgate(port: int, upstreams: list[int]) -> list[str]:
    backends = [part for url in _urls(upstreams) for part in ("--backend", url)]
    options = ["--port", str(port), "--admin-port", "0", "--set", "log.requests=false"]
    return [sys.executable, "-m", "gateway.cli.main", "serve", *backends, *options]


def _smg(port: int, upstreams: list[int]) -> list[str] | None:
    binary = CACHE / "smg" / "bin" / "smg"
    if not binary.exists():
        return None
    options = ["--policy", "cache_aware", "--log-level", "error", "--port", str(port)]
    metrics = ["--prometheus-port", str(free_port())]
    return [str(binary), "launch", "--worker-urls", *_urls(upstreams), *options, *metrics]


def _vllm_router(port: int, upstreams: list[int]) -> list[str] | None:
    binary = CACHE / "vllm-router" / "bin" / "vllm-router"
    if not binary.exists():
        return None
    options = ["--policy", "cache_aware", "--log-level", "error", "--port", str(port)]
    metrics = ["--prometheus-port", str(free_port())]
    return [str(binary), "--worker-urls", *_urls(upstreams), *options, *metrics]


_COMMANDS = {
    "nginx": _nginx,
    "haproxy": _haproxy,
    "radixgate": _radixgate,
    "smg": _smg,
    "vllm-router": _vllm_router,
}
PEERS = tuple(_COMMANDS)


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except FileNotFoundError:
            continue
        found += [int(child) for child in children.split()]
    return found


def _cpu_ns(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total
