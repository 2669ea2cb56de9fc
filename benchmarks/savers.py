"""Measure checkpoints inside other trainers: how long a step stands still, and when the file is durable.

Every trainer saves weights and AdamW's state at regular steps, in its own way and by trainbus. Each way runs in a separate
process with its own memory. All ways run in turn, several times. `save_job` describes the measurement.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.harness import Settings
from benchmarks.save_figures import SaverFigures
from benchmarks.save_job import RESULT, Run, Size, train
from benchmarks.trainers import TRAINERS, load

IMPORTED = [f"benchmarks.trainers.{module}" for module in TRAINERS] + ["benchmarks.store_server", "benchmarks.store_job"]
"""Modules that the processes import once for all of them."""
Result = TypeVar("Result")

TINY = (Size("0.1 M", layers=8, width=128, rows=8, interval=10, saves=2),)
SIZES = (
    Size("30 M", layers=28, width=1024, rows=128, interval=40, saves=4),
    Size("100 M", layers=95, width=1024, rows=128, interval=50, saves=4),
)


def run(settings: Settings) -> list[SaverFigures]:
    modules, left_out = load()
    ways = [(title, name) for title, module in modules.items() for name in module.SAVERS]
    sizes, rounds = TINY if settings.quick else SIZES, settings.rounds(quick=1, full=3)
    runs: dict[str, dict[str, list[Run]]] = {size.name: {name: [] for _, name in ways} for size in sizes}
    turns = [(size, title, name) for _ in range(rounds) for size in sizes for title, name in ways]
    for done, (size, title, name) in enumerate(turns):
        settings.tick(done, len(turns))
        runs[size.name][name].append(alone(train, title, name, size, result=Run))
    return [SaverFigures(f"A save of {size.name} parameters and AdamW's state", runs[size.name], left_out) for size in sizes]


def alone(work: Callable[..., object], *arguments: object, result: type[Result]) -> Result:
    """Call a function in a separate process, with a directory as its last argument; return what it writes there.

    Raises:
        RuntimeError: the process failed, and printed the reason.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory(prefix="trainbus-bench-") as directory:
        process = processes.Process(target=work, args=(*arguments, Path(directory)))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"{work.__name__}{arguments} ended with exit code {process.exitcode}")
        return msgspec.json.decode((Path(directory) / RESULT).read_bytes(), type=result)
