"""Measure saves of a model's weights to an S3 server and to a disk: how long training waits, and when they are durable.

Each way to save runs in a separate process with its own memory. All ways run in turn, several times. `store_job` describes the
measurement, `store_server` the server.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Settings
from benchmarks.save_job import Size
from benchmarks.savers import alone
from benchmarks.store_disk import Disk
from benchmarks.store_figures import StoreFigures
from benchmarks.store_job import Place, Run, measure

TINY = ((Size("0.1 M", layers=8, width=128, rows=8, interval=5, saves=2), 1),)
SIZES = (
    (Size("30 M", layers=28, width=1024, rows=128, interval=20, saves=2), 3),
    (Size("100 M", layers=95, width=1024, rows=128, interval=20, saves=2), 2),
)
"""With the number of rounds."""


def run(settings: Settings) -> list[StoreFigures]:
    with ExitStack() as scopes:
        missing: dict[str, str] = {}
        places: list[Place] = [Disk(Path(scopes.enter_context(tempfile.TemporaryDirectory(prefix="trainbus-bench-"))))]
        try:
            from benchmarks.store_server import server
        except ImportError as error:
            missing["an S3 server"] = str(error)
        else:
            places.insert(0, scopes.enter_context(server()))
        return compare(settings, places, missing)


def compare(settings: Settings, places: Sequence[Place], missing: dict[str, str]) -> list[StoreFigures]:
    turns, figures = [], []
    for place in places:
        ways, left_out = place.ways()
        for size, rounds in TINY if settings.quick else SIZES:
            runs: dict[str, list[Run]] = {name: [] for name in ways}
            turns += [(place, name, size, runs[name]) for _ in range(rounds) for name in ways]
            title = f"Weights of {size.name} parameters, saved to {place.title}"
            figures.append(StoreFigures(title, runs, place.floor, place.reference, place.promised, {**left_out, **missing}))
    for done, (place, name, size, found) in enumerate(turns):
        settings.tick(done, len(turns))
        found.append(alone(measure, place, name, size, result=Run))
    return figures
