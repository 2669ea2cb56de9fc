"""``python -m benchmarks nvrx [--hangs N] [--slow N] [--quick]``: trainings under NVRx's ``ft_launcher`` hang, or save slowly.

The limit of the launcher is 3 s without a heartbeat. Again and again the training thread hangs, or the disk becomes so slow
that one save takes 8 s. Each time with trainbus:

- a hang is caught, and the training goes on from the newest committed save;
- a slow save is no hang: no process ends.

At the end the newest save has the weights and momentum, bit by bit, of an undisturbed process.

Beside it, the same training as NVRx's example writes it: a heartbeat after each iteration, and ``torch.save`` in place.
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
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import report
from benchmarks.harness import environment
from benchmarks.nvrx_job import EPOCH, INTERVAL, KEPT, PADDING, make
from trainbus.eventloop.checkpoint import load, verify

LIMIT = 3.0  # seconds
PATIENCE = 120.0  # seconds for anything to happen
PART = 3  # strikes of one training
WAYS = {"trainbus": "trainbus", "NVRx's example": "example"}
TRAINS = 3.0  # seconds of training before a strike, at most
LAUNCHER = "-m nvidia_resiliency_ext.fault_tolerance.launcher --nproc-per-node 1 --max-restarts 1000 --rdzv-backend c10d"
LIMITS = {"workload_check_interval": 0.5, "initial_rank_heartbeat_timeout": 60, "rank_heartbeat_timeout": LIMIT}


class LostError(AssertionError):
    """A promise was broken."""


@dataclass
class Strike:
    """One strike, and what became of the training."""

    kind: str
    done: int
    """Iterations that were done."""
    goes_on_at: int
    lost: int
    """Iterations that were done and had to be repeated."""
    lost_saves: int
    """Saves that were finished, not replaced, and not gone on from."""
    ended: bool
    """Whether the process was ended."""
    caught: float | None
    """Seconds from the hang to the end of the process."""
    seconds: float | None
    """From the end of the process to the end of the first new iteration."""


class Training:
    """A training under ``ft_launcher``, and the story that it has logged."""

    def __init__(self, place: Path, way: str, rng: random.Random) -> None:
        place.mkdir()
        self.place, self._rng, self._ours = place, rng, way == "trainbus"
        (place / "limits.yaml").write_text(json.dumps({"fault_tolerance": LIMITS}))
        options = ["--rdzv-endpoint", "localhost:0", "--ft-cfg-path", str(place / "limits.yaml")]
        command = [sys.executable, *LAUNCHER.split(), *options, "-m", "benchmarks.nvrx_job", way, str(place)]
        given = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        with (place / "launcher.log").open("wb") as log:
            self.launcher = subprocess.Popen(command, env=given, stdout=log, stderr=log, start_new_session=True)  # noqa: S603

    @property
    def story(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for path in self.place.glob("*.jsonl") for line in path.read_text().splitlines()]
        return sorted(lines, key=lambda line: line["at"])

    def of(self, key: str, *, since: float = 0.0) -> list[dict[str, Any]]:
        return [one for one in self.story if key in one and one["at"] > since]

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise LostError(f"{what} did not come about")
            time.sleep(0.02)
        return found

    def strike(self, kind: str) -> Strike:
        time.sleep(self._rng.uniform(0, TRAINS))
        began = self.of("begins")[-1]
        struck = time.time()
        (self.place / kind).touch()
        (hit,) = self.wait(kind, lambda: self.of("hangs" if kind == "hang" else "slow", since=struck))

        def is_over() -> bool:
            saved = kind == "slow" and self.of("committed", since=hit["at"]) and not ended()
            return bool(saved) or ended()

        def ended() -> bool:
            return not Path(f"/proc/{hit['pid']}").exists()

        self.wait("the end of it", is_over)
        at, over = time.time(), ended()
        new = self.wait("the next process", lambda: self.of("begins", since=at))[-1] if over else None
        first = self.wait("an iteration", lambda: self.of("done", since=at))[0]
        done = [one["done"] for one in self.of("done", since=began["at"]) if one["at"] < at][-1]
        saves = [one["committed"] for one in self.of("committed", since=began["at"]) if one["at"] < at]
        goes_on = new["begins"] if new else done
        found = Strike(
            kind=kind,
            done=done,
            goes_on_at=goes_on,
            lost=max(0, done - goes_on),
            lost_saves=len([save for save in saves[-KEPT if self._ours else -1 :] if save > goes_on]),
            ended=over,
            caught=at - hit["at"] if kind == "hang" else None,
            seconds=first["at"] - at if new else None,
        )
        if self._ours and (found.lost_saves or found.ended != (kind == "hang")):
            raise LostError(str(found))
        return found

    def finish(self) -> dict[str, Any]:
        """End the training in order; check its weights, and return what is known of the whole."""
        (self.place / "finish").touch()
        try:
            status = self.launcher.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            raise LostError(f"ft_launcher ended with {status}")
        if self._ours:
            self._check()
        return {
            "stalls": [one["stall"] for one in self.of("stall")],
            "saves": [one["committed"] for one in self.of("committed")],
            "on_training_thread": self.of("heartbeats")[-1]["heartbeats"],  # mean and p99 of each training
        }

    def _check(self) -> None:
        for path in (self.place / "runs").glob("*.safetensors"):
            verify(path)
        done = self.of("done")[-1]["done"]
        saved = load(self.place / "runs" / f"iter_{done}.safetensors")
        model, optimizer, data = make()
        for number in range(done):
            optimizer.zero_grad()
            model(data[number % EPOCH]).sum().backward()
            optimizer.step()
        momentum = saved["optimizer"]["optimizer"]["state"][0]["momentum_buffer"]
        expected = optimizer.state_dict()["state"][0]["momentum_buffer"]
        if not (torch.equal(saved["state_dict"]["weights"], model.weights) and torch.equal(momentum, expected)):
            raise LostError("weights or momentum are not those of an undisturbed training")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)
        self.launcher.wait()
        for one in {line["pid"] for line in self.story}:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


def run(place: Path, way: str, kinds: Sequence[str], seed: int) -> dict[str, Any]:
    """Strike a training; return what happened."""
    training, strikes = Training(place, way, random.Random(f"{seed}{place.name}")), []
    try:
        training.wait("the first save", lambda: training.of("committed"))
        for number, kind in enumerate(kinds):
            strikes.append(training.strike(kind))
            print(f"{way} {place.name}.{number + 1}: {strikes[-1]}", flush=True)
            training.wait("a save", lambda: training.of("committed", since=training.of("begins")[-1]["at"]))
        return {"strikes": [asdict(one) for one in strikes], **training.finish()}
    finally:
        training.kill()


def summary(ways: dict[str, dict[str, Any]]) -> Table:
    """Return the table of both ways: medians."""
    grid = Table(title=f"Hangs and slow saves under NVRx, limit {LIMIT:g} s", title_justify="left", title_style="bold")
    grid.add_column("")
    columns = []
    for name, way in ways.items():
        grid.add_column(name, justify="right")
        hangs, slow = ([one for one in way["strikes"] if one["kind"] == kind] for kind in ("hang", "slow"))
        mean, p99 = (statistics.median(way["on_training_thread"][start::2]) for start in (0, 1))
        columns.append(
            {
                "hangs": len(hangs),
                "caught after, s": f"{statistics.median(one['caught'] for one in hangs):.1f}",
                "trains again after, s": f"{statistics.median(one['seconds'] for one in hangs):.1f}",
                "iterations lost": f"{statistics.median(one['lost'] for one in hangs):.0f}",
                "slow saves": len(slow),
                "processes ended in these": sum(one["ended"] for one in slow),
                "saves lost": sum(one["lost_saves"] for one in way["strikes"]),
                "stall of a save, ms": f"{1e3 * statistics.median(way['stalls']):.1f}",
                "heartbeats, on the training thread, an iteration, µs": f"{1e6 * mean:.1f}",
                "the same, p99": f"{1e6 * p99:.1f}",
            }
        )
    for row in columns[0]:
        grid.add_row(row, *(str(column[row]) for column in columns))
    return grid


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks nvrx", description=__doc__)
    parser.add_argument("--hangs", type=int, default=6, help="times that the training hangs")
    parser.add_argument("--slow", type=int, default=3, help="saves on a slow disk")
    parser.add_argument("--quick", action="store_true", help="one of each, with trainbus only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    options = parser.parse_args(arguments)
    if find_spec("nvidia_resiliency_ext") is None:
        sys.exit("NVRx is not installed: pip install 'trainbus[nvrx]'")
    torch.set_num_threads(1)
    kinds = ["hang"] * (1 if options.quick else options.hangs) + ["slow"] * (1 if options.quick else options.slow)
    random.Random(options.seed).shuffle(kinds)
    place = Path(tempfile.mkdtemp(prefix="trainbus-nvrx-"))
    ways: dict[str, dict[str, Any]] = {name: defaultdict(list) for name in [*WAYS][: 1 if options.quick else None]}
    try:
        for number, some in enumerate(kinds[at : at + PART] for at in range(0, len(kinds), PART)):
            for name in ways:  # alternating, because the machine is not always as busy
                for key, found in run(place / f"{WAYS[name]}-{number}", WAYS[name], some, options.seed).items():
                    ways[name][key] += found
    except LostError as error:
        sys.exit(f"lost: {error} (all files are in {place})")
    shutil.rmtree(place)
    if options.out is not None:
        of_all = {"limit": LIMIT, "interval": INTERVAL, "bytes": 8 * PADDING}
        options.out.write_text(json.dumps({"environment": environment(), **of_all, **ways}, indent=1))
    report.console.print(summary(ways))


if __name__ == "__main__":
    main(sys.argv[1:])
