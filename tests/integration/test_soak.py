"""The soak itself, for seconds: it must run, explain every outcome and give everything back."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_short_soak_explains_every_outcome() -> None:
    argv = [sys.executable, "-m", "loadtest.soak", "--seconds", "5", "--no-memory"]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "unexplained outcomes: 0" in ended.stdout
    assert "stream ok" in ended.stdout
