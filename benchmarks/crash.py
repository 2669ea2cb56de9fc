"""``python -m benchmarks crash [--kills N]``: kill a training that saves all the time, again and again; nothing may be lost.

This is not a comparison: nothing is timed. A real training process is killed with SIGKILL at random instants, and another one
continues in the same directory. Some instants are counted from the begin or the report of a save; a tenth of the kills happen
in a directory without a checkpoint. After every kill:

- each checkpoint file loads, verifies, and is the state of exactly one step, the one in its name;
- each file reported as committed exists, unless retention removed it for newer ones;
- ``last_checkpoint`` names a file at least as new as the newest reported one;
- the next process resumes from the newest complete file, which may be newer than that one.

At the end, each state that was found is a state of a run without kills, random states included.
"""

import argparse
import gc
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import crash_job
from benchmarks.crash_job import KEEP, score
from benchmarks.harness import environment
from trainbus.eventloop import CheckpointError
from trainbus.eventloop.checkpoint import TEMPORARY_PREFIX, load, verify

LIVES = 10  # kills in one directory
LATEST = 0.25  # seconds after the start within which a kill without a trigger happens; training begins after about 0.05
CLOSE = 0.006  # seconds after an event within which a kill triggered by it happens; a save takes about 0.003
PATIENCE = 30.0  # seconds for a process to reach the point of its kill


class LostError(AssertionError):
    """A promise was broken."""


@dataclass
class Moment:
    """The moment of a kill: a number of lines of a kind after the start, then some seconds; and how that process saves."""

    kind: str
    count: int
    seconds: float
    staging: str

    @classmethod
    def draw(cls, rng: random.Random, *, first: bool) -> "Moment":
        kind = rng.choice(["start", "staged"] if first else ["start", "staged", "committed"])
        staging = rng.choice(["block", "overlap"])
        if kind == "start":
            return cls(kind, 0, rng.uniform(0, LATEST), staging)
        return cls(kind, 1 if first else rng.randint(1, 12), rng.uniform(0, CLOSE), staging)


@dataclass
class Directory:
    """One work dir, and the reports about it."""

    path: Path
    reported: list[str] = field(default_factory=list)
    goes_on_at: int = 0
    chains: dict[int, int] = field(default_factory=dict)

    def check(self, lines: list[dict], seen: Counter) -> None:
        """Check that nothing is lost after a process reported ``lines`` and was killed."""
        self._check_beginning(lines)
        for line in lines:
            self.reported += line.get("committed", [])
        steps = {path.name: self._check_file(path) for path in self.path.glob("*.safetensors")}
        seen["files verified"] += len(steps)
        self._check_reported(steps)
        self._check_pointer(steps, seen)
        seen["committed, reported"] += sum(len(line.get("committed", [])) for line in lines)
        seen["committed, killed before it was reported"] += len(steps.keys() - set(self.reported))
        leftovers = list(self.path.glob(f"{TEMPORARY_PREFIX}*"))
        seen["killed while a file was being written"] += bool(leftovers)
        for path in leftovers:
            path.unlink()  # so that the next one is told from it

    def _check_beginning(self, lines: list[dict]) -> None:
        for line in lines:
            if "began" in line and line["began"] != self.goes_on_at:
                raise LostError(
                    f"the run resumed at step {line['began']}, the newest complete checkpoint was of step {self.goes_on_at}"
                )

    def _check_file(self, path: Path) -> int:
        try:
            verify(path)
            state = load(path)
        except CheckpointError as error:
            raise LostError(f"a file with a final name does not load: {error}") from error
        step, model = state["progress"]["iter"], state["state_dict"]
        momenta = [one["momentum_buffer"] for one in state["optimizer"]["optimizer"]["state"].values()]
        weights = [value for name, value in model.items() if name.startswith("weights.")]
        assert len(weights) == len(momenta) == len(crash_job.SHAPES)
        wrong = [
            *(one for one in weights if not bool((one == step * (step + 1) / 2).all())),
            *(one for one in momenta if not bool((one == -step).all())),
            *([model["seen"]] if not bool((model["seen"] == step).all()) else []),
        ]
        counts = {step, int(path.stem.rpartition("_")[2]), state["bus"]["hooks"]["Teller"]["count"]}
        if wrong or len(counts) > 1:
            raise LostError(f"{path} is not the state of one step: counts {counts}, {[one.flatten()[:3] for one in wrong]}")
        chain = int(model["chain"])
        if self.chains.setdefault(step, chain) != chain:
            raise LostError(f"{path}: step {step} had another state before the kill")
        return step

    def _check_reported(self, steps: dict[str, int]) -> None:
        regular = {name for name in steps if name.startswith("iter_")}
        best = steps.keys() - regular
        for name in set(self.reported) - steps.keys():
            step = int(name.removesuffix(".safetensors").rpartition("_")[2])
            if name.startswith("iter_"):
                replaced = sum(steps[other] > step for other in regular) >= KEEP
            else:
                replaced = any(score(steps[other]) > score(step) for other in best)
            if not replaced:
                raise LostError(f"{name} was reported as committed, but is missing; found {sorted(steps)}")

    def _check_pointer(self, steps: dict[str, int], seen: Counter) -> None:
        self.goes_on_at = max(steps.values(), default=0)
        pointer = self.path / "last_checkpoint"
        if not pointer.is_file():
            if self.reported:
                raise LostError(f"{self.reported[-1]} was reported as committed, but last_checkpoint is missing")
            return
        name = pointer.read_text()
        newest = max((int(one[5:-12]) for one in self.reported if one.startswith("iter_")), default=0)
        if name not in steps or steps[name] < newest:
            raise LostError(f"last_checkpoint says {name!r}, reported was step {newest}; there are {sorted(steps)}")
        seen["killed between a file and last_checkpoint"] += steps[name] < max(steps.values())


def live(directory: Path, moment: Moment) -> list[dict]:
    """Start a training, kill it at ``moment``, and return its reports."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        crash_job.train_until_killed(directory, writing, moment.staging)
    os.close(writing)
    said = bytearray()
    try:
        _wait_for(moment, reading, said)
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        while more := os.read(reading, 1 << 16):
            said += more
        os.close(reading)
    if not os.WIFSIGNALED(status):
        raise LostError(f"the training ended by itself; see {directory.with_suffix('.log')}")
    return [json.loads(line) for line in said.splitlines()]


def _wait_for(moment: Moment, reading: int, said: bytearray) -> None:
    deadline = time.monotonic() + PATIENCE
    mark = f'"{moment.kind}"'.encode()
    while moment.count and said.count(mark) < moment.count:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        more = os.read(reading, 1 << 16) if ready else b""
        if not more:  # too slow, or it ended by itself, which the caller sees
            return
        said += more
    time.sleep(moment.seconds)


def run(kills: int, seed: int, place: Path) -> dict:
    """Kill a number of processes; return the counts of what was seen."""
    rng = random.Random(seed)
    seen: Counter = Counter()
    found: dict[int, int] = {}
    directory = Directory(place / "none")
    began = time.perf_counter()
    for number in range(kills):
        if number % LIVES == 0:
            directory = Directory(place / f"run_{number // LIVES}", chains=found)
        moment = Moment.draw(rng, first=not directory.reported)
        directory.check(live(directory.path, moment), seen)
        seen[f"killed after: {moment.kind}"] += 1
        seen[f"staging: {moment.staging}"] += 1
        seen["killed before anything was committed"] += not directory.reported
        if (number + 1) % LIVES == 0:
            shutil.rmtree(directory.path, ignore_errors=True)
        if (number + 1) % 50 == 0 or number + 1 == kills:
            print(f"{number + 1:>6} kills  {time.perf_counter() - began:>6.1f} s  {dict(seen)}", flush=True)
    if found:
        truth = crash_job.chains(max(found))
        if other := [step for step, chain in found.items() if truth[step] != chain]:
            raise LostError(f"a run without kills has another state after the steps {sorted(other)}")
    return {"kills": kills, "seed": seed, "seconds": time.perf_counter() - began, "steps compared": len(found), **seen}


def _warm_up(directory: Path) -> None:
    """Import and initialise everything that a training needs, so that processes are forked in milliseconds."""
    crash_job.make_loop(crash_job.saving(), work_dir=directory, steps=8).run()
    crash_job.make_loop(crash_job.saving(), work_dir=directory, steps=12).run(resume="auto")
    # A fork takes along only one thread. (Those of numpy's BLAS do not count: it shuts them down before a fork.)
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    options = parser.parse_args(arguments)
    where = environment()
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix="trainbus-crash-"))
    _warm_up(place / "warm")
    try:
        result = run(options.kills, options.seed, place)
    except LostError as error:
        sys.exit(f"lost: {error} (all files are in {place})")
    shutil.rmtree(place)
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": where, **result}, indent=1, default=str))
    print(f"{options.kills:,} kills in {result['seconds']:.0f} s: nothing lost")
