"""``python -m benchmarks ray [--workers N] [--nodes N] [--drains N] [--quick]``: workers and nodes of Ray die.

Two workers on two nodes of a Ray cluster on this computer train in one ``fit()``. Again and again a worker dies (SIGKILL), a
node dies with its worker, or a node gets a drain notice and goes 8 s later. Each time with trainbus:

- the training goes on from the newest committed save; each save verifies;
- a drain costs no iteration that was done at the notice.

At the end Ray's Result has the newest save, and weights and momentum are bitwise those of one undisturbed process.

Beside it, the same training as Ray's documentation writes it (``torch.save`` and ``report(checkpoint=from_directory)``): a save
counts once ``report`` has returned on both workers. A stall is the time between the ends of two iterations around a save, less
the median of the others. *Start* is the time from the strike until Ray calls the training again, *train* from there to the end
of the first iteration.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import elastic_job, report
from benchmarks.harness import environment
from trainbus.eventloop.checkpoint import load, verify
from trainbus.hooks import CheckpointHook

PATIENCE = 180.0  # seconds for anything to happen
NOTICE = 8.0  # seconds from a drain notice to the end of the node
TRAINS = 6.0  # seconds of training before a strike, at most
KEPT = 5
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[1]),
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",  # Ray waits 60 s for a node that is gone
}


class LostError(AssertionError):
    """A promise was broken."""


@dataclass
class Strike:
    """One strike, and what became of the training."""

    kind: str
    done: int
    """Iterations that were done at the strike; of a drain, at the notice."""
    goes_on_at: int
    lost: int
    """Iterations that were done and had to be repeated."""
    lost_saves: int
    """Saves that counted and were not gone on from."""
    seconds: float
    """From the strike (of a drain, from the end of the node) to the end of the first new iteration."""
    restart: float
    """Of these, the seconds until Ray calls the training again."""
    load: float
    """Processes that wanted a core of this computer in the last minute, on average."""


class Story:
    """What the workers have logged."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._read: dict[Path, int] = {}
        self.lines: list[dict[str, Any]] = []

    def read(self) -> "Story":
        """Read what is new. A line is there whole or not at all."""
        for path in sorted(self._place.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                self.lines += map(json.loads, file.readlines())
                self._read[path] = file.tell()
        self.lines.sort(key=lambda line: line["at"])
        return self

    def of(self, key: str, *, since: float = 0.0, until: float = float("inf"), rank: int | None = None) -> list[dict[str, Any]]:
        return [one for one in self.lines if key in one and since < one["at"] < until and rank in (None, one["rank"])]

    def stalls(self) -> list[float]:
        """Return the seconds that each save took from the training thread of rank 0."""
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for before, after in pairwise(self.of("done", rank=0)):
            if before["pid"] == after["pid"]:
                gaps[before["done"] % INTERVAL == 0].append(after["at"] - before["at"])
        usual = statistics.median(gaps[False])
        return [gap - usual for gap in gaps[True]]


@dataclass
class Experiment:
    cluster: Any
    place: Path
    rng: random.Random
    ours: bool

    def __post_init__(self) -> None:
        self.story, self.training = Story(self.place), Future[Any]()
        self._verified: set[str] = set()

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.training.done():
                raise LostError(f"{what}: the training has ended with {self.training.result()}")
            if time.monotonic() > deadline:
                raise LostError(f"{what}: not within {PATIENCE:.0f} s")
            time.sleep(0.05)
            self.story.read()
            self.verify()

    def verify(self) -> None:
        """Verify each save of trainbus once, unless Ray has deleted it already."""
        for one in self.story.of("path") if self.ours else ():
            path = one["path"]
            if path not in self._verified and Path(path).exists():
                verify(path)
                self._verified.add(path)

    def saves(self, *, since: float = 0.0, until: float = float("inf")) -> set[int]:
        """Return the iterations of the saves that counted in a time: with Ray's own way on both ranks."""
        ranks = [
            {one["committed"] for one in self.story.of("committed", since=since, until=until, rank=rank)} for rank in (0, 1)
        ]
        return ranks[0] if self.ours else ranks[0] & ranks[1]

    def workers(self) -> list[int]:
        return [max(self.story.of("begins", rank=rank), key=lambda one: one["at"])["pid"] for rank in (0, 1)]

    def strike(self, kind: str) -> Strike:
        time.sleep(self.rng.uniform(0, TRAINS))
        began = self.story.read().of("begins")[-1]["at"]
        at = struck = time.time()
        if kind == "worker":
            os.kill(self.rng.choice(self.workers()), signal.SIGKILL)
        else:
            node = self.rng.choice(list(self.cluster.worker_nodes))
            if kind == "drain":
                drain(node, at + NOTICE)
                time.sleep(NOTICE)
                struck = time.time()
            self.cluster.remove_node(node, allow_graceful=False)
            self.cluster.add_node(num_cpus=1)
        self.wait(
            f"training after the end of a {kind}",
            lambda: (
                len(self.story.of("begins", since=struck)) > 1
                and self.story.of("done", since=struck)[-1:]
                and self.goes(struck)
            ),
        )
        new = self.story.of("begins", since=struck)[-1]
        done = max((one["done"] for one in self.story.of("done", since=began, until=at)), default=new["begins"])
        found = Strike(
            kind=kind,
            done=done,
            goes_on_at=new["begins"],
            lost=max(0, done - new["begins"]),
            lost_saves=len([save for save in self.saves(since=began, until=struck) if save > new["begins"]]),
            seconds=self.goes(struck) - struck,
            restart=self.story.of("started", since=struck, until=new["at"])[-1]["at"] - struck,
            load=os.getloadavg()[0],
        )
        if self.ours and (found.lost_saves or found.lost > (INTERVAL + 10 if kind != "drain" else 0)):
            raise LostError(str(found))
        return found

    def goes(self, struck: float) -> float:
        """Return when the first iteration of the newest processes ended; 0 if it has not."""
        newest = self.story.of("begins", since=struck)[-1]
        done = [one["at"] for one in self.story.of("done", since=newest["at"]) if one["pid"] == newest["pid"]]
        return done[0] if done else 0.0

    def check(self, result: Any) -> dict[str, Any]:
        """Check Ray's Result and the weights, and return what else there is to know."""
        done = self.story.read().of("done")[-1]["done"]
        with result.checkpoint.as_directory() as folder:
            (file,) = Path(folder).iterdir()
            saved = load(file)
        if result.metrics["iter"] != done or saved["progress"]["iter"] != done:
            raise LostError(f"{done} iterations are done, and Ray's Result has {result.metrics}, {saved['progress']}")
        epochs = saved["progress"]["epoch"]
        elastic_job.make_loop(CheckpointHook(save_last=True), work_dir=self.place / "undisturbed", epochs=epochs).run()
        expected = load(self.place / "undisturbed" / f"epoch_{epochs}.safetensors")
        if any(not torch.equal(*pair) for pair in zip(numbers(saved), numbers(expected), strict=True)):
            raise LostError("weights or momentum are not those of an undisturbed training")
        if (kept := len([*Path(result.path).glob("*.safetensors")])) > KEPT + 1:
            raise LostError(f"{kept} files are left, and num_to_keep is {KEPT}")
        handlers = defaultdict(list)
        for line in self.story.of("handlers"):
            for name, times in line["handlers"].items():
                handlers[name].append(times)
        return {
            "iterations": done,
            "committed": len(self.saves()),
            "verified": len(self._verified),
            "handlers": {
                name: {"mean": max(one[0] for one in many), "p99": max(one[1] for one in many)}
                for name, many in handlers.items()
            },
        }


def numbers(checkpoint: dict[str, Any]) -> list[torch.Tensor]:
    return [checkpoint["state_dict"]["weights"], checkpoint["optimizer"]["optimizer"]["state"][0]["momentum_buffer"]]


def drain(node: Any, deadline: float) -> None:
    """Have Ray tell that a node will go at a Unix time in s, as a cloud tells of a spot machine."""
    import ray
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    GcsClient(address=ray.get_runtime_context().gcs_address).drain_node(
        node.node_id, reason, "a spot machine", int(deadline * 1000)
    )


@contextmanager
def started() -> Iterator[Any]:
    """Start a head without cores and two nodes with one core each."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ |= VARIABLES
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, runtime_env={"env_vars": VARIABLES}, log_to_driver=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def run(cluster: Any, place: Path, train: Callable[..., None], kinds: list[str], seed: int, *, ours: bool) -> dict[str, Any]:
    """Strike a training; return what happened."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    place.mkdir()
    began = time.monotonic()
    found = Experiment(cluster, place, random.Random(seed), ours)
    trainer = TorchTrainer(
        train,
        train_loop_config={"log": str(place)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(place / "storage"),
            name="x",
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=KEPT),
        ),
    )
    with ThreadPoolExecutor(1) as pool:
        found.training = pool.submit(trainer.fit)
        try:
            found.wait("the first iteration", lambda: found.story.of("done"))
            table = []
            for number, kind in enumerate(kinds):
                table.append(found.strike(kind))
                print(f"{number + 1:>3}: {line(table[-1])}", flush=True)
            found.wait("one more save", lambda: found.saves(since=found.story.of("begins")[-1]["at"]))
        finally:
            (place / "finish").touch()
        result = found.training.result(PATIENCE)
    checked = found.check(result) if ours else {}
    return {
        "strikes": [asdict(one) for one in table],
        "stalls": found.story.read().stalls(),
        "seconds": round(time.monotonic() - began, 1),
        **checked,
    }


def add(way: dict[str, Any], found: dict[str, Any]) -> None:
    """Add what happened in one turn to that of the turns before."""
    for name, value in found.items():
        if name == "handlers":  # the slowest of all turns
            before = way.setdefault(name, {})
            way[name] = {
                one: max(times, before.get(one, times), key=lambda times: times["mean"]) for one, times in value.items()
            }
        else:
            way[name] = way[name] + value if name in way else value


def line(one: Strike) -> str:
    return (
        f"end of a {one.kind}: started after {one.restart:.1f} s, training after {one.seconds:.1f} s, at {one.goes_on_at}; "
        f"{one.lost} of {one.done} iterations and {one.lost_saves} saves lost"
    )


def summary(ways: dict[str, dict[str, Any]]) -> Table:
    """Return the table of both ways: medians, and the most of all."""
    grid = Table(title="Workers and nodes of Ray die", title_justify="left", title_style="bold", box=None, padding=(0, 0, 0, 2))
    grid.add_column("")
    for heading in ("strikes", "saves\nlost", "iter.\nlost", "stall\nms", "start\ns", "train\ns"):
        for column in (heading,) if heading in ("strikes", "saves\nlost") else (heading, "most"):
            grid.add_column(column, justify="right")
    for name, way in ways.items():
        lost, restart = ([one[key] for one in way["strikes"]] for key in ("lost", "restart"))
        seconds = [one["seconds"] - one["restart"] for one in way["strikes"]]
        stalls = [1e3 * one for one in way["stalls"]]
        grid.add_row(
            name,
            str(len(lost)),
            str(sum(one["lost_saves"] for one in way["strikes"])),
            *(text for many in (lost, stalls) for text in (f"{statistics.median(many):.0f}", f"{max(many):.0f}")),
            *(text for many in (restart, seconds) for text in (f"{statistics.median(many):.1f}", f"{max(many):.1f}")),
        )
    return grid


def main(arguments: list[str]) -> None:
    global INTERVAL, PADDING
    parser = argparse.ArgumentParser(prog="python -m benchmarks ray", description=__doc__)
    parser.add_argument("--workers", type=int, default=20, help="workers that die")
    parser.add_argument("--nodes", type=int, default=5, help="nodes that die")
    parser.add_argument("--drains", type=int, default=2, help="nodes that are drained")
    parser.add_argument("--turns", type=int, default=3, help="how often both ways take turns")
    parser.add_argument("--quick", action="store_true", help="one worker dies")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    options = parser.parse_args(arguments)
    try:
        from benchmarks import ray_job
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: pip install 'trainbus[ray]'")
    INTERVAL, PADDING = ray_job.INTERVAL, ray_job.PADDING
    torch.set_num_threads(1)
    kinds = (
        ["worker"] if options.quick else ["worker"] * options.workers + ["node"] * options.nodes + ["drain"] * options.drains
    )
    random.Random(options.seed).shuffle(kinds)
    place, where = Path(tempfile.mkdtemp(prefix="trainbus-ray-")), environment()
    ways: dict[str, dict[str, Any]] = {}
    try:
        with started() as cluster:
            for turn in range(turns := min(options.turns, len(kinds))):
                some = kinds[turn::turns]
                found = run(cluster, place / f"ours-{turn}", ray_job.with_trainbus, some, turn, ours=True)
                add(ways.setdefault("trainbus", {}), found)
                some = [one for one in some if one != "drain"]  # Ray's own training would have to ask for notices
                found = run(cluster, place / f"theirs-{turn}", ray_job.as_ray_documents, some, turn, ours=False)
                add(ways.setdefault("Ray", {}), found)
    except LostError as error:
        sys.exit(f"lost: {error} (all files are in {place})")
    shutil.rmtree(place)
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": where, "interval": INTERVAL, "bytes": 8 * PADDING, **ways}, indent=1))
    report.console.print(summary(ways))
    ours = ways["trainbus"]
    for name, times in sorted(ours["handlers"].items()):
        print(f"on the training thread: {name} took {times['mean'] * 1e6:.0f} µs, p99 {times['p99'] * 1e6:.0f} µs")
    print(
        f"{ours['committed']} saves committed, {ours['verified']} of them verified while they were there; Ray's Result has the "
        "last iteration, with the weights of an undisturbed training"
    )
