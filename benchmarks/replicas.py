"""``python -m benchmarks torchft [--kills N] [--quick]``: replica groups of torchft die.

Two replica groups on this computer train together. Again and again one of them, chosen at random, is killed (SIGKILL), and
started again at once. Every second kill comes while a save is being written. With trainbus (``Run(replicas=manager)``):

- each step is committed with the learning rate, the averaged weights, the counts and the weights of a training that was not
  struck, bit for bit, in both groups; so are the lines of their loggers, but for the outputs of a step in which a group healed;
- each group trains in step n the batch n of its data, or none;
- the folder has the files of a training that was not struck, but for those that were being written by a group that was killed,
  each of which the other group has made up for. Every file verifies.

Beside it, the same training as torchft's documentation writes it: state functions for model, optimizer, average and schedule,
and the first group's ``torch.save`` every ``INTERVAL`` steps. A stall is the time between the ends of two iterations around a
save in the group that saves, less the median of the others.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import report
from benchmarks.harness import environment
from benchmarks.replicas_job import INTERVAL
from trainbus.eventloop import CheckpointError
from trainbus.eventloop.checkpoint import verify

PATIENCE = 90.0  # seconds for anything to happen
STEPS = 120  # for each kill
TIMES = {"join_timeout_ms": 1000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 1000}
"""Milliseconds after which the lighthouse goes on without a group that is silent. By default it waits 5 s."""
GROUPS = ("a", "b")
KINDS = ("trainbus", "own")
SAME = ("epoch", "update", "rate", "weights", "average")


class LostError(AssertionError):
    """A promise was broken."""


@dataclass
class Strike:
    """One kill, and what became of the training."""

    group: str
    saving: bool
    """True if a save was being written."""
    first: bool
    """True if the group was the one that saves."""
    pause: float
    """Seconds from the kill to the next step that the other group committed."""
    heals: float
    """Seconds from the start of the new process, which has imported torch, to the first step that it committed."""
    missed: int
    """Steps that the group did not take part in."""


class Story:
    """What the groups have logged, by group."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._read: dict[Path, int] = {}
        self.lines: dict[str, list[dict[str, Any]]] = {}

    def read(self) -> "Story":
        """Read what is new."""
        for path in sorted(self._place.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = [line for line in file.readlines() if line.endswith(b"\n")]
            self._read[path] = self._read.get(path, 0) + sum(map(len, whole))
            group, process, _ = path.name.split(".")
            self.lines.setdefault(group, []).extend({"process": int(process), **json.loads(line)} for line in whole)
        return self

    def of(self, group: str, key: str, process: int = 0) -> list[dict[str, Any]]:
        return [one for one in self.lines.get(group, ()) if key in one and process in (0, one["process"])]

    def done(self, group: str, process: int = 0) -> int:
        return max((one["done"] for one in self.of(group, "done", process)), default=-1)


class Experiment:
    """A training of two groups in a folder, and a lighthouse."""

    def __init__(self, kind: str, steps: int, place: Path, rng: random.Random) -> None:
        self.kind, self.steps, self.place, self.rng = kind, steps, place, rng
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.story = Story(place)
        self.strikes: list[Strike] = []

    def start(self, group: str) -> None:
        command = [sys.executable, "-m", "benchmarks.replicas_job", self.kind, group, str(self.steps)]
        with (self.place / f"{group}.log").open("ab") as log:
            self.processes[group] = subprocess.Popen(command, cwd=self.place, stdout=log, stderr=log)  # noqa: S603

    def wait(self, what: str, until: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not until():
            for group, process in self.processes.items():
                if process.poll() is not None:
                    raise LostError(
                        f"group {group} ended with {process.returncode} while waiting for {what}: {self.tail(group)}"
                    )
            if time.monotonic() > deadline:
                raise LostError(f"{what} did not come within {PATIENCE:.0f} s; see {self.place}")
            time.sleep(0.005)
            self.story.read()

    def tail(self, group: str) -> str:
        return (self.place / f"{group}.log").read_text(errors="replace")[-2000:]

    def both_train(self) -> None:
        """Wait until both groups have committed three steps in their present processes."""
        for group, process in self.processes.items():
            self.wait(f"training of {group}", lambda: len(self.story.of(group, "done", process.pid)) > 2)  # noqa: B023

    def strike(self, *, saving: bool) -> None:
        """Kill a group at random, or the one that saves, and start it again."""
        self.both_train()
        group = self.rng.choice(GROUPS)
        if saving:
            count = {one: len(self.story.of(one, "saves")) for one in GROUPS}
            self.wait("a save", lambda: any(len(self.story.of(one, "saves")) > count[one] for one in GROUPS))
            group = next(one for one in GROUPS if len(self.story.of(one, "saves")) > count[one])
            time.sleep(self.rng.uniform(0, 0.02))
        else:
            time.sleep(self.rng.uniform(0, 1.0))
        other, victim = next(one for one in GROUPS if one != group), self.processes[group]
        victim.send_signal(signal.SIGKILL)
        at = time.time()
        victim.wait()
        self.start(group)
        new = self.processes[group].pid
        before = self.story.read().done(group)
        was_first = bool(self.story.of(group, "first") and self.story.of(group, "first")[-1]["first"])
        self.wait(f"the return of {group}", lambda: self.story.of(group, "done", new))
        began = self.story.of(group, "start", new)[0]["time"]
        came = self.story.of(group, "done", new)
        went_on = min(one["time"] for one in self.story.of(other, "done") if one["time"] > at)
        missed = came[0]["done"] - before - 1
        strike = Strike(group, saving, was_first, went_on - at, came[0]["time"] - began, missed)
        self.strikes.append(strike)
        print(f"{len(self.strikes):>3}: {line(strike)}", flush=True)

    def finish(self) -> None:
        for group, process in self.processes.items():
            if status := process.wait(PATIENCE + self.steps):
                raise LostError(f"group {group} ended with {status}: {self.tail(group)}")
        self.story.read()


@contextmanager
def lighthouse() -> Iterator[str]:
    """Run torchft's lighthouse; yield its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, **TIMES)
    try:
        yield server.address()
    finally:
        server.shutdown()


@contextmanager
def experiment(kind: str, steps: int, place: Path, seed: int) -> Iterator[Experiment]:
    place.mkdir()
    with lighthouse() as address:
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            "RUST_LOG": "error",
            "TORCHFT_LIGHTHOUSE": address,
        }
        found = Experiment(kind, steps, place, random.Random(seed))
        try:
            yield found
        finally:
            for process in found.processes.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()


def run(kind: str, kills: int, place: Path, seed: int) -> Experiment:
    """Train two groups and kill one of them that often."""
    with experiment(kind, STEPS * kills, place, seed) as found:
        for group in GROUPS:
            found.start(group)
        for number in range(kills):
            found.strike(saving=number % 2 == 1)
        found.finish()
        return found


def undisturbed(steps: int, place: Path) -> Experiment:
    """Train one group alone."""
    with experiment("alone", steps, place, 0) as found:
        found.start(GROUPS[0])
        found.finish()
        return found


# ------------------------------------------------------------------------------------------------------------ verdicts


def check(struck: Experiment, smooth: Experiment) -> dict[str, int]:
    """Compare all that the groups did with a training that was not struck; return how much was compared."""
    expected = {one["done"]: one for one in smooth.story.of(GROUPS[0], "done")}
    lines = scalars(smooth, GROUPS[0])
    compared, seen, read = 0, set[int](), dict[int, Any]()
    for group in GROUPS:
        for one in struck.story.of(group, "done"):
            own = expected[one["done"]]
            if wrong := [key for key in SAME if one[key] != own[key]]:
                raise LostError(f"step {one['done']} of {group}: {wrong[0]} is {one[wrong[0]]} and not {own[wrong[0]]}")
            if one["samples"] not in (None, own["samples"]):
                raise LostError(f"step {one['done']} of {group} trained another batch")
            compared += 1
            seen.add(one["done"])
        healed = {one["done"] + 1 for one in struck.story.of(group, "done") if one["samples"] is None}
        for step, values in scalars(struck, group).items():
            if values != lines[step] and not (step in healed and "train/loss" not in values):
                raise LostError(f"line {step} of {group}: {values} is not {lines[step]}")
            read |= {step: values} if step not in healed else {}
    if missing := expected.keys() - seen:
        raise LostError(f"no group committed the steps {sorted(missing)[:5]}")
    return {
        "steps": len(seen),
        "compared": compared,
        "lines": len(read),
        "healed": sum(one.missed > 0 for one in struck.strikes),
    }


def scalars(found: Experiment, group: str) -> dict[int, dict[str, Any]]:
    path = found.place / "run" / group / "scalars.jsonl"
    values = [json.loads(line) for line in path.read_text().splitlines()]
    return {one["step"]: {name: value for name, value in one.items() if name != "time"} for one in values}


def saves(found: Experiment) -> dict[str, Any]:
    """Count the saves that were due, those that cannot be loaded, and how long each stopped the training."""
    due = range(INTERVAL, found.steps + 1, INTERVAL)
    missing, damaged = [], []
    for step in due:
        path = found.place / "run" / (f"{step}.pt" if found.kind == "own" else f"iter_{step}.safetensors")
        if not path.exists():
            missing.append(step)
            continue
        try:
            torch.load(path) if found.kind == "own" else verify(path)
        except (CheckpointError, RuntimeError, EOFError):
            damaged.append(step)
    names = {path.name for path in (found.place / "run").glob("iter_*.safetensors")}
    extra = sorted(int(name.split("_")[1].split(".")[0]) for name in names - {f"iter_{step}.safetensors" for step in due})
    return {"due": len(due), "missing": missing, "damaged": damaged, "made_up": extra, "stall": stall(found)}


def stall(found: Experiment) -> float:
    """Return the median seconds between the ends of two steps around a save, less the median of the other steps together."""
    around, others = [], []
    for group in GROUPS:
        for process in {one["process"] for one in found.story.of(group, "done")}:
            written = {one["saves"] for one in found.story.of(group, "saves", process)}
            rows = found.story.of(group, "done", process)
            for one, two in pairwise(rows):
                if two["done"] != one["done"] + 1 or two["time"] - one["time"] > 0.12:
                    continue  # alone, or the other group has died
                # Our save comes after the line of its step, that of the own way before it.
                save = two["done"] + 1 if found.kind == "own" else two["done"]
                (around if save in written else others).append(two["time"] - one["time"])
    return statistics.median(around) - statistics.median(others) if around and others else float("nan")


def samples_again(found: Experiment) -> int:
    """Return how many batches a group has trained again within an epoch of its data, or in another place than its step."""
    again, epoch = 0, 120
    for group in GROUPS:
        rows = {one["done"]: tuple(one["samples"]) for one in found.story.of(group, "done") if one["samples"] is not None}
        for first in range(0, found.steps, epoch):
            batches = [rows[step] for step in range(first, first + epoch) if step in rows]
            numbers = [number for batch in batches for number in batch]
            again += len(numbers) - len(set(numbers))
    return again


def check_saves(ours: dict[str, Any]) -> None:
    kept = ours["saves"]
    if kept["damaged"] or len(kept["missing"]) > len(kept["made_up"]) or ours["samples_again"]:
        raise LostError(f"saves: {kept}; samples trained again: {ours['samples_again']}")


def line(one: Strike) -> str:
    what = f"{one.group}{' (saves)' if one.first else ''}{', within a save' if one.saving else ''}"
    return f"{what}: next step after {one.pause:.2f} s; back {one.heals:.1f} s after its start, {one.missed} steps missed"


def summary(results: dict[str, Any]) -> Table:
    """Return the table of both ways."""
    grid = Table(title="Replica groups of torchft die", title_justify="left", title_style="bold")
    grid.add_column("")
    columns = ("kills", "lost saves", "made up", "damaged", "stall per save", "s to go on", "s to heal", "samples again")
    for heading in columns:
        grid.add_column(heading, justify="right")
    for kind, one in results.items():
        kept = one["saves"]
        grid.add_row(
            {"own": "torch.save"}.get(kind, kind),
            str(len(one["strikes"])),
            f"{max(0, len(kept['missing']) + len(kept['damaged']) - len(kept['made_up']))} of {kept['due']}",
            str(len(kept["made_up"])),
            str(len(kept["damaged"])),
            f"{1000 * kept['stall']:.1f} ms",
            f"{statistics.median(strike['pause'] for strike in one['strikes']):.2f}",
            f"{statistics.median(strike['heals'] for strike in one['strikes']):.1f}",
            str(one["samples_again"]),
        )
    return grid


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks torchft", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two kills, with trainbus only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    options = parser.parse_args(arguments)
    kills, where = 2 if options.quick else options.kills, environment()
    place = Path(tempfile.mkdtemp(prefix="trainbus-torchft-"))
    results: dict[str, Any] = {}
    try:
        smooth = undisturbed(STEPS * kills, place / "alone")
        for kind in KINDS[:1] if options.quick else KINDS:
            found = run(kind, kills, place / kind, options.seed)
            compared = check(found, smooth) if kind == "trainbus" else {}
            strikes = [asdict(one) for one in found.strikes]
            results[kind] = {"strikes": strikes, "saves": saves(found), "samples_again": samples_again(found), **compared}
        check_saves(results["trainbus"])
    except LostError as error:
        sys.exit(f"lost: {error} (all files are in {place})")
    shutil.rmtree(place)
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": where, "interval": INTERVAL, **results}, indent=1))
    report.console.print(summary(results))
    ours = results["trainbus"]
    print(
        f"{len(ours['strikes'])} kills: {ours['compared']} steps and {ours['lines']} lines are as in an undisturbed training. "
        f"Saves made up for: {len(ours['saves']['missing'])}"
    )
