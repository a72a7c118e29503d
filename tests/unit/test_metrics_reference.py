import os
import subprocess
import sys
from pathlib import Path

from gateway.core.types import Outcome
from gateway.telemetry.families import FAMILIES
from gateway.telemetry.reference import DOCS, error_codes, metrics_md
from tests.unit.test_telemetry import CONTRACT

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_metrics_are_current() -> None:
    assert (ROOT / DOCS).read_text() == metrics_md(), "run `make reference`"


def test_every_family_is_documented_with_its_labels() -> None:
    lines = metrics_md().splitlines()
    for family in FAMILIES:
        (line,) = [one for one in lines if one.startswith(f"| `{family.name}` | {family.kind} |")]
        assert family.text in line
        for label in family.labels:
            assert f"`{label}`" in line


def test_documented_are_at_least_the_contracts() -> None:
    assert set(CONTRACT) <= {family.name for family in FAMILIES}


def test_every_code_and_outcome_is_listed() -> None:
    codes = error_codes()
    assert {"queue_full", "rate_limited", "draining", "internal_error"} <= set(codes)
    lines = metrics_md().splitlines()
    (shown,) = [line for line in lines if line.startswith("| `code` |")]
    assert all(f"`{code}`" in shown for code in codes)
    (shown,) = [line for line in lines if line.startswith("| `outcome` |")]
    assert all(f"`{outcome.value}`" in shown for outcome in Outcome)


def test_writing_goes_to_its_place(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    argv = [sys.executable, "-m", "gateway.telemetry.reference", "--write"]
    subprocess.run(argv, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / DOCS).read_text() == metrics_md()
