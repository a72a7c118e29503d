"""The engines and the gateway that the end-to-end tests share.

Every test that uses `fleet` or `gateway` runs on simulated replicas and on llama.cpp (always) and on
vLLM (only under `make e2e-vllm`, which sets E2E_VLLM_PYTHON): the simulator is held to the claims
that the real engines are.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.fleet import (
    ENGINES,
    Fleet,
    Gateway,
    TinyModel,
    eventually,
    start_fleet,
    start_gateway,
)

VLLM_START_S = 900
SIM = pytest.param("sim")
LLAMACPP = pytest.param("llamacpp", marks=[pytest.mark.e2e])
VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(VLLM_START_S)])


@dataclass(frozen=True)
class Engine:
    """An engine and the interpreter that has it."""

    name: str
    python: str


def _vllm_python() -> str:
    python = os.environ.get("E2E_VLLM_PYTHON", "")
    if not python:
        pytest.skip("vLLM runs only under `make e2e-vllm`")
    home = Path(python).parent.parent
    if not (home / "ready").exists():
        failed = home / "failed"
        reason = failed.read_text(encoding="utf-8").strip() if failed.exists() else "not tried"
        pytest.skip(f"vLLM could not be installed on this machine: {reason}")
    return python


@pytest.fixture(scope="session", params=[SIM, LLAMACPP, VLLM])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Return the engine this run of the tests is about."""
    name: str = request.param
    return Engine(name, _vllm_python() if name == "vllm" else sys.executable)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Make the model once; it takes a second and is never kept in the repository."""
    home = tmp_path_factory.mktemp("model")
    model = TinyModel(home / "tiny", home / "tiny.gguf")
    argv = [sys.executable, str(ENGINES / "make_tiny_model.py")]
    argv += ["--out", str(model.directory), "--gguf", str(model.gguf)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return model


@pytest.fixture(scope="session")
def fleet(
    engine: Engine, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Run two replicas for the whole session."""
    logs = tmp_path_factory.mktemp(f"{engine.name}-logs")
    with start_fleet(engine.name, engine.python, tiny_model, logs) as running:
        yield running


@pytest.fixture(scope="session")
def gateway(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Run the gateway in front of both replicas, without any configuration file."""
    arguments = [word for url in fleet.urls for word in ("--backend", url)]
    with start_gateway(arguments, tmp_path_factory.mktemp("gateway")) as running:
        eventually(lambda: len(running.backends()) == 2, what="both backends in /status")
        yield running
