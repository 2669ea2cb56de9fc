"""``python -m tests.interleaver [--every N] [--seed N] [--processes N]``: run the interleavings, and count them.

Each case has a watchdog. A process whose case hangs prints where all threads are, and ends; another one goes on behind it.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import structlog
import torch

from .cases import OPERATIONS, Case, cases, run

WATCHDOG = 20.0  # seconds for one case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="run one in so many")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--operations", nargs="+", default=[*OPERATIONS], help="which operations")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--calls", type=int, default=1, help="calls that each caller makes at a line")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    return child(given.child) if given.child else parent(given)


def parent(given: argparse.Namespace) -> int:
    began = time.monotonic()
    chosen = [case for case in cases(given.operations, given.every, given.seed, given.calls) if given.only in str(case)]
    failures = run_all(chosen, given.processes)
    for line in failures:
        print(line)  # noqa: T201 - a command
    hangs = sum(line.startswith("HANGS") for line in failures)
    wrong = len(failures) - hangs
    print(f"{len(chosen)} interleavings in {time.monotonic() - began:.0f} s: {hangs} hang, {wrong} are wrong")  # noqa: T201
    return 1 if failures else 0


def run_all(chosen: list[Case], processes: int) -> list[str]:
    """Run cases in so many processes at a time; return what is wrong."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        files = [Path(folder, str(shard)) for shard in range(processes)]
        for shard, file in enumerate(files):
            file.write_bytes(pickle.dumps(chosen[shard::processes]))
        return [line for found in pool.map(watch, files) for line in found]


def watch(file: Path) -> list[str]:
    """Run the cases in a file, in a process after the other; return what is wrong."""
    failures: list[str] = []
    while left := pickle.loads(file.read_bytes()):  # noqa: S301 - our own
        done = subprocess.run(  # noqa: S603 - this module
            [sys.executable, "-m", "tests.interleaver", "--child", file],
            capture_output=True,
            text=True,
            env=os.environ | {"TRAINBUS_CHECK_LOCKS": "1", "OMP_NUM_THREADS": "1"},
        )
        lines = done.stdout.splitlines()
        failures += [line for line in lines if line.startswith("WRONG")]
        ended = sum(line == "next" for line in lines)
        if done.returncode:
            what = "HANGS" if "Timeout (" in done.stderr else "DIES"
            failures.append(f"{what} {left[ended - 1]}\n{done.stderr}")
        elif ended != len(left):
            failures.append(f"DIES {left[ended - 1]} without a word")
        file.write_bytes(pickle.dumps(left[ended:]))
    return failures


def child(file: Path) -> int:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    structlog.configure(processors=[_drop])
    torch.compiler.reset()  # imports the compiler, which takes seconds
    for case in pickle.loads(file.read_bytes()):  # noqa: S301 - our own
        print("next", flush=True)  # noqa: T201
        faulthandler.dump_traceback_later(WATCHDOG, exit=True)
        try:
            run(case)
        except BaseException as error:  # noqa: BLE001 - all that is wrong is reported
            what = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"WRONG {case}: {what}", flush=True)  # noqa: T201
    faulthandler.cancel_dump_traceback_later()
    return 0


def _drop(*_: object) -> NoReturn:
    raise structlog.DropEvent


if __name__ == "__main__":
    sys.exit(main())
