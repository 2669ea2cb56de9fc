"""``python -m benchmarks elastic [--strikes N] [--quick]``: machines die, leave and join a training on a store.

This is not a comparison. One to four ``torchrun --nnodes=1:4`` agents train together on this computer. Each has a disk of its
own, which is empty when it joins and which the others cannot open. Checkpoints go to an S3 server behind a proxy that delays,
throttles, fails and resets requests. The rendezvous is hosted by this process, so any machine may go. Again and again, chosen
at random, one machine dies (SIGKILL of the agent and of its worker), leaves (SIGTERM of the agent), or joins. Each time:

- the training goes on from the newest committed checkpoint, within 30 s after the processes started;
- a kill costs at most ``INTERVAL`` iterations, and those that were trained during one upload; leaving and joining cost none;
- a worker that got SIGTERM exits with status 75;
- no process has opened another machine's disk.

After every fifth strike the store is away for 20 s, which must not end a process.

At the end, each sample was used once per epoch, the newest checkpoints in the store are complete, and weights and momentum are
bitwise those of one undisturbed process.

Before all that, ``vanish.py`` cuts the link of a machine.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.distributed import TCPStore

from benchmarks import elastic_job, report, vanish
from benchmarks.elastic_job import INTERVAL, KEPT, SAMPLES, URL, WORK_DIR
from benchmarks.elastic_machine import LOGS, MACHINES
from benchmarks.flaky import Faults, FlakyProxy, s3_server
from benchmarks.harness import environment
from trainbus.eventloop.checkpoint import as_path, list_files, load, verify
from trainbus.hooks import CheckpointHook

FAULTS = Faults(latency=0.03, slow_down=0.04, error=0.02, reset=0.02, lost=0.02)
MOST = 4  # machines
SHORT = ("kill", "join")
PREEMPTED = 75
GOES_ON = 30.0  # seconds from the start of the processes to their first iteration
PATIENCE = 180.0  # seconds for anything to happen
OUTAGE = 20.0  # seconds for which the store is away, after every fifth strike
TRAINS = 3.0  # seconds of training before a strike, at most
TORCHRUN = "-m torch.distributed.run --nproc-per-node=1 --max-restarts=100 --rdzv-backend=c10d --rdzv-id=x"
RENDEZVOUS = "is_host=false,last_call_timeout=3"
QUICK = ",keep_alive_interval=1"  # a machine that died is noticed after 3 s instead of 15


class LostError(AssertionError):
    """A promise was broken."""


@dataclass
class Machine:
    """An agent of ``torchrun`` with a disk of its own."""

    name: str
    agent: "subprocess.Popen[bytes]"

    @classmethod
    def join(cls, place: Path, name: str, endpoint: str, rendezvous: str) -> "Machine":
        disk = place / "machines" / name
        disk.mkdir(parents=True)
        options = [f"--nnodes=1:{MOST}", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={rendezvous}", "--local-addr=127.0.0.1"]
        command = [sys.executable, *TORCHRUN.split(), *options, "-m", "benchmarks.elastic_machine"]
        with (place / f"{name}.log").open("wb") as log:
            return cls(name, subprocess.Popen(command, cwd=disk, stdout=log, stderr=log, start_new_session=True))  # noqa: S603

    def kill(self) -> None:
        """End the agent and its workers at once, as a power cut does."""
        self.agent.send_signal(signal.SIGSTOP)  # so that it starts no other worker in the meantime
        for process in [self.agent.pid, *descendants(self.agent.pid)]:
            os.kill(process, signal.SIGKILL)
        self.agent.wait()

    def leave(self) -> None:
        self.agent.terminate()
        self.agent.wait(PATIENCE)


def descendants(process: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
    found = [process]
    for one in found:  # which grows
        found += children[one]
    return found[1:]


@dataclass
class Attempt:
    """What the processes of one rendezvous did."""

    began: float
    """When the first of them started, as Unix time in s."""
    begins: int = 0
    """Iterations in the checkpoint that they went on from."""
    ranks: int = 0
    first: float | None = None
    """When the first iteration ended."""
    last: float = 0.0
    longest: float = 0.0
    """The longest time between the ends of two iterations, in s."""
    done: int = 0
    """Iterations at the end."""
    epochs: dict[int, int] = field(default_factory=dict)
    taken: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The samples of each iteration."""


class Story:
    """What all processes have logged so far."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.attempts: dict[int, Attempt] = {}
        self.committed: list[tuple[float, int]] = []
        """When a checkpoint was in the store, and its iterations."""
        self.staged: list[tuple[float, int]] = []
        self.exits: dict[str, list[int]] = defaultdict(list)
        """Exit statuses of processes that had begun to train, by machine."""
        self.failures: list[str] = []
        self._read: dict[Path, int] = {}
        self._of: dict[Path, int] = {}
        self._started: dict[Path, float] = {}

    def read(self) -> "Story":
        """Read what is new. A line is there whole or not at all."""
        for path in sorted(self._logs.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.readlines()
                self._read[path] = file.tell()
            for line in lines:
                self._take(path, json.loads(line))
        return self

    def _take(self, path: Path, line: dict[str, Any]) -> None:
        match line:
            case {"started": _}:
                self._started[path] = line["at"]
            case {"attempt": attempt}:
                self._of[path] = attempt
                mine = self.attempts.setdefault(attempt, Attempt(self._started[path]))
                mine.began = min(mine.began, self._started[path])
                mine.begins = mine.done = line["begins"]
                mine.ranks = line["ranks"]
            case {"takes": iteration}:
                mine = self.attempts[self._of[path]]
                mine.epochs[iteration] = line["epoch"]
                mine.taken[iteration] += line["samples"]
            case {"done": iteration}:
                mine = self.attempts[self._of[path]]
                mine.done = max(mine.done, iteration + 1)
                mine.first = mine.first or line["at"]
                mine.longest = max(mine.longest, line["at"] - (mine.last or line["at"]))
                mine.last = max(mine.last, line["at"])
            case {"staged": path}:
                self.staged.append((line["at"], elastic_job.iteration(path)))
            case {"committed": path} if path.startswith(URL):
                self.committed.append((line["at"], elastic_job.iteration(path)))
            case {"exited": status} if path in self._of:
                self.exits[path.name.partition("-")[0]].append(status)
            case {"failed": error}:
                self.failures.append(error)
            case {"trespassed": path}:
                raise LostError(f"a process has opened {path}, which is on another machine")

    def newest(self) -> Attempt:
        return self.attempts[max(self.attempts)]

    def used(self) -> dict[int, tuple[int, list[int]]]:
        """Return epoch and samples of each iteration that counts: of those that were repeated, the last."""
        history: dict[int, tuple[int, list[int]]] = {}
        for _, one in sorted(self.attempts.items()):
            history = {iteration: what for iteration, what in history.items() if iteration < one.begins}
            history |= {iteration: (one.epochs[iteration], taken) for iteration, taken in one.taken.items()}
        return history


@dataclass
class Strike:
    """One strike, and what became of the training."""

    kind: str
    before: int
    """Machines."""
    after: int
    iteration: int
    """Iterations that were done when the old processes had ended."""
    goes_on_at: int
    lost: int
    """Iterations that were done and had to be repeated."""
    uploading: int
    """Of the lost iterations, those trained while a checkpoint was being uploaded."""
    rendezvous: float
    """Seconds from the strike to the start of the new processes."""
    seconds: float
    """From there to the end of the first iteration."""
    statuses: list[int]
    """Exit statuses of the workers."""
    load: float
    """Processes that wanted a core of this computer in the last minute, on average."""


def checked(one: Strike) -> Strike:
    """Check what was promised about a strike."""
    if one.lost - one.uploading > (INTERVAL if one.kind == "kill" else 0):
        raise LostError(f"{one} lost {one.lost} iterations")
    if one.kind != "kill" and set(one.statuses) != {PREEMPTED}:
        raise LostError(f"{one}: the workers exited with {one.statuses}, not with {PREEMPTED}")
    if one.seconds > GOES_ON:
        raise LostError(f"{one} went on after {one.seconds:.1f} s")
    return one


@dataclass
class Experiment:
    place: Path
    endpoint: str
    rendezvous: str
    """Options of the rendezvous."""
    rng: random.Random
    machines: list[Machine] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.story = Story(self.place / "logs")

    def join(self) -> None:
        self.number += 1
        self.machines.append(Machine.join(self.place, f"m{self.number}", self.endpoint, self.rendezvous))

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise LostError(f"{what}: not within {PATIENCE:.0f} s; failures: {self.story.failures[-3:]}")
            time.sleep(0.05)
            self.story.read()

    def wait_for_training(self, after: float = 0.0) -> Attempt:
        """Wait until all machines train in processes that started ``after`` a time."""

        def trains() -> bool:
            ended = [one.name for one in self.machines if one.agent.poll() is not None]
            if ended:
                raise LostError(f"the agents of {', '.join(ended)} ended; failures: {self.story.failures[-3:]}")
            if not self.story.attempts:
                return False
            newest = self.story.newest()
            return newest.began > after and newest.first is not None and newest.ranks == len(self.machines)

        self.wait(f"training with {len(self.machines)} machines", trains)
        return self.story.newest()

    def strike(self, kind: str) -> Strike:
        time.sleep(self.rng.uniform(0, TRAINS))
        self.story.read()
        before, at = len(self.machines), time.time()
        if kind == "join":
            self.join()
        else:
            struck = self.machines.pop(self.rng.randrange(before))
            struck.kill() if kind == "kill" else struck.leave()
        last, exits = max(self.story.attempts), {name: len(found) for name, found in self.story.exits.items()}
        new = self.wait_for_training(at)
        chain = [one for attempt, one in sorted(self.story.attempts.items()) if attempt >= last]
        done = chain[0].done
        statuses = [status for name, found in self.story.exits.items() for status in found[exits.get(name, 0) :]]
        staged = max((step for when, step in self.story.staged if when < new.began and step <= done), default=0)
        newest = max((step for when, step in self.story.committed if when < new.began), default=0)
        if new.begins < newest:
            raise LostError(f"after a {kind} the training went on at {new.begins}, and {newest} was committed")
        return checked(
            Strike(
                kind=kind,
                before=before,
                after=len(self.machines),
                iteration=done,
                goes_on_at=new.begins,
                lost=sum(one.done - after.begins for one, after in pairwise(chain)),
                uploading=done - staged if staged > new.begins else 0,
                rendezvous=new.began - at,
                seconds=new.first - new.began,
                statuses=sorted(statuses),
                load=os.getloadavg()[0],
            )
        )

    def outage(self, store: FlakyProxy) -> float:
        """Take the store away for ``OUTAGE`` seconds; return the longest time in s without an iteration."""
        attempt = max(self.story.read().attempts)
        newest, back = self.story.newest(), time.time() + OUTAGE
        newest.longest = 0.0
        store.down(OUTAGE)
        self.wait(
            "a checkpoint in the store after an outage", lambda: any(back < at < newest.last for at, _ in self.story.committed)
        )
        if max(self.story.attempts) != attempt:
            raise LostError(f"an outage of the store ended the training; failures: {self.story.failures[-3:]}")
        return newest.longest

    def finish(self) -> None:
        """Let the training end with its epoch."""
        (self.place / "logs" / "finish").touch()
        for one in self.machines:
            if status := one.agent.wait(PATIENCE):
                raise LostError(f"the agent of {one.name} exited with {status}; failures: {self.story.failures[-3:]}")
        self.story.read()

    def check_samples(self) -> int:
        """Check that each epoch used each sample once; return the number of epochs."""
        seen: dict[int, Counter[int]] = defaultdict(Counter)
        for epoch, samples in self.story.used().values():
            seen[epoch].update(samples)
        for epoch, counts in seen.items():
            if counts != Counter(range(SAMPLES)):
                wrong = [(sample, counts[sample]) for sample in range(SAMPLES) if counts[sample] != 1]
                raise LostError(f"epoch {epoch}: {len(wrong)} samples were not used once, such as {wrong[:5]} (sample, uses)")
        if sorted(seen) != list(range(len(seen))):
            raise LostError(f"epochs {sorted(seen)}")
        return len(seen)

    def check_store(self, epochs: int) -> None:
        """Check the newest checkpoints, and the weights against those of one undisturbed process."""
        steps = sorted({step for _, step in self.story.committed})[-KEPT:]
        folder = as_path(f"{URL}/{WORK_DIR}")
        found = {elastic_job.iteration(str(path)): path for path, _ in list_files(folder) if path.suffix == ".safetensors"}
        if missing := set(steps) - set(found):
            raise LostError(f"committed and not in the store: {missing}; there are {sorted(found)}")
        for step in steps:
            verify(found[step])
        undisturbed = self.place / "undisturbed"
        elastic_job.make_loop(CheckpointHook(save_last=True), work_dir=undisturbed, epochs=epochs).run()
        saved, expected = load(found[steps[-1]]), load(undisturbed / f"epoch_{epochs}.safetensors")
        if saved["progress"]["iter"] != expected["progress"]["iter"]:
            raise LostError(f"{saved['progress']} is not {expected['progress']}")
        if any(not torch.equal(*pair) for pair in zip(numbers(saved), numbers(expected), strict=True)):
            raise LostError("weights or momentum are not those of an undisturbed training")


def numbers(checkpoint: dict[str, Any]) -> list[torch.Tensor]:
    return [checkpoint["state_dict"]["weights"], checkpoint["optimizer"]["optimizer"]["state"][0]["momentum_buffer"]]


@contextmanager
def experiment(place: Path, seed: int, *, quick: bool) -> Iterator[tuple[Experiment, FlakyProxy]]:
    with ExitStack() as stack:
        proxy = stack.enter_context(s3_server(FAULTS, seed))
        (place / "logs").mkdir()
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": proxy.url,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            MACHINES: str(place / "machines"),
            LOGS: str(place / "logs"),
        }
        as_path(URL).fs.mkdir(URL.removeprefix("s3://").partition("/")[0])
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        options = RENDEZVOUS + (QUICK if quick else "")
        found = Experiment(place, f"127.0.0.1:{store.port}", options, random.Random(seed))
        try:
            yield found, proxy
        finally:
            for machine in found.machines:
                if machine.agent.poll() is None:
                    machine.kill()


def draw(rng: random.Random, machines: int) -> str:
    return rng.choice([*(["kill", "leave"] if machines > 1 else []), *(["join"] if machines < MOST else [])])


def run(strikes: int, seed: int, place: Path, *, quick: bool) -> dict[str, Any]:
    """Strike a training that often; return what happened."""
    began = time.monotonic()
    with experiment(place, seed, quick=quick) as (found, proxy):
        for _ in range(2):
            found.join()
        found.wait_for_training()
        table: list[Strike] = []
        outages: list[float] = []
        for number in range(strikes):
            table.append(found.strike(SHORT[number] if quick else draw(found.rng, len(found.machines))))
            print(f"{number + 1:>3}: {line(table[-1])}", flush=True)
            if number % 5 == 4:
                outages.append(found.outage(proxy))
                print(f"     store away for {OUTAGE:.0f} s: longest iteration {outages[-1]:.1f} s", flush=True)
        time.sleep(TRAINS)
        found.finish()
        epochs = found.check_samples()
        found.check_store(epochs)
        return {
            "strikes": [asdict(one) for one in table],
            "outages": [{"seconds": OUTAGE, "longest_iteration": longest} for longest in outages],
            "epochs": epochs,
            "iterations": found.story.newest().done,
            "starts": len(found.story.attempts),
            "committed": len(found.story.committed),
            "interval": INTERVAL,
            "store": {"faults": asdict(FAULTS), "counts": dict(proxy.counts)},
            "seconds": round(time.monotonic() - began, 1),
        }


def line(one: Strike) -> str:
    return (
        f"{one.kind}, {one.before} machines to {one.after}: new processes after {one.rendezvous:.1f} s, training after "
        f"{one.seconds:.1f} s; {one.lost} of {one.iteration} iterations lost ({one.uploading} during an upload)"
    )


def summary(strikes: list[dict[str, Any]]) -> Table:
    """Return the table of strikes by kind: iterations lost, and medians of seconds."""
    grid = Table(title="Machines die, leave and join", title_justify="left", title_style="bold")
    grid.add_column("")
    for heading in ("times", "most lost", "in an upload", "s to restart", "s to train", "most"):
        grid.add_column(heading, justify="right")
    for kind in sorted({one["kind"] for one in strikes}):
        rows = [one for one in strikes if one["kind"] == kind]
        worst = max(rows, key=lambda one: one["lost"])
        seconds = [one["seconds"] for one in rows]
        grid.add_row(
            kind,
            str(len(rows)),
            str(worst["lost"]),
            str(worst["uploading"]),
            f"{statistics.median(one['rendezvous'] for one in rows):.1f}",
            f"{statistics.median(seconds):.1f}",
            f"{max(seconds):.1f}",
        )
    return grid


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks elastic", description=__doc__)
    parser.add_argument("--strikes", type=int, default=20, help="0 for the machine that vanishes alone")
    parser.add_argument("--quick", action="store_true", help="one machine that vanishes, one kill and one join")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    options = parser.parse_args(arguments)
    where = environment()
    vanished = vanish.run(quick=options.quick)
    if vanished:
        report.console.print(vanish.table(vanished))
    result: dict[str, Any] = {"vanished": vanish.as_json(vanished)}
    if options.strikes:
        result |= strike(options)
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": where, **result}, indent=1))


def strike(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix="trainbus-elastic-"))
    try:
        result = run(len(SHORT) if options.quick else options.strikes, options.seed, place, quick=options.quick)
    except LostError as error:
        sys.exit(f"lost: {error} (all files are in {place})")
    shutil.rmtree(place)
    report.console.print(summary(result["strikes"]))
    print(f"the store: {result['store']['counts']}")
    print(
        f"{len(result['strikes'])} strikes in {result['seconds']:.0f} s: nothing lost, each sample once in {result['epochs']} "
        "epochs, the weights of an undisturbed training"
    )
    return result
