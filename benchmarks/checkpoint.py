"""Checkpoints: their cost for the training, and the time until they are durable.

- ``saving``: how long training stands still, how long until the file is on disk, and how fast a commit is.
- ``overlapping``: how much longer a step takes beside a copy.
- ``beside``: how much longer a step of Python takes while a save is being written.
- ``slow_disk``: whole runs on a disk of 20 MB/s.

Files are in the folder of temporary files (``TMPDIR``), which must be on a disk for meaningful figures.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks import beside, overlapping, report, saving, slow_disk
from benchmarks.harness import Comparison, Settings, Tick, one_thread
from benchmarks.throttle import NoThrottleError

Part = Callable[[Settings, Path, Tick], list[Comparison]]


def run(settings: Settings) -> list[Comparison]:
    parts: tuple[Part, ...] = (large_saves, small_saves, overlaps, beside_python, on_slow_disk, commits)
    comparisons = []
    for number, part in enumerate(parts):

        def tick(done: int, rounds: int, before: int = number) -> None:
            settings.tick_part(before, len(parts), done, rounds)

        # A directory for each, so that the disk holds the files of only one of them at a time.
        with one_thread(), saving.place() as directory:
            comparisons += part(settings, directory, tick)
    return comparisons


def large_saves(settings: Settings, directory: Path, tick: Tick) -> list[Comparison]:
    return saving.saves(settings, saving.sizes(settings)[0], directory, tick)


def small_saves(settings: Settings, directory: Path, tick: Tick) -> list[Comparison]:
    return saving.saves(settings, saving.sizes(settings)[1], directory, tick)


def overlaps(settings: Settings, directory: Path, tick: Tick) -> list[Comparison]:
    return [overlapping.steps(settings, size, directory, tick) for size in saving.sizes(settings)]


def beside_python(settings: Settings, directory: Path, tick: Tick) -> list[Comparison]:
    return beside.steps(settings, saving.sizes(settings)[1], directory, tick)


def commits(settings: Settings, directory: Path, tick: Tick) -> list[Comparison]:
    return [saving.commits(settings, saving.sizes(settings)[0], directory, tick)]


def on_slow_disk(settings: Settings, directory: Path, tick: Tick) -> list[Comparison]:
    try:
        return slow_disk.compare(settings, directory, tick)
    except NoThrottleError as error:
        report.console.print(f"no slow disk: {error}", style="yellow")
        return []
