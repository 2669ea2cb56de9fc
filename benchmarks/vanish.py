"""The scene of ``python -m benchmarks elastic`` in which a machine vanishes: its link is cut, and no connection is closed.

Two ``torchrun`` agents train in two network namespaces, behind a bridge of this computer, which has the rendezvous. The link
of one is cut and its processes are killed, or the link is up again after ``HEALS`` seconds. The same is done to a loop without
trainbus. It needs root and ``ip`` (iproute2).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch.distributed import TCPStore

from benchmarks.elastic_machine import LOGS

MACHINES = ("m1", "m2")
NET = f"198.18.{os.getpid() % 256}"  # of addresses for benchmarks (RFC 2544)
HEALS = 20.0  # seconds that a cut lasts which heals
TIMEOUT = 40.0  # seconds that ranks wait for one another
UNTIL = 300.0  # seconds after which a training that still waits has lost
PATIENCE = 120.0  # seconds for a training to start
TRAINS = 3.0  # seconds of training before a cut
TORCHRUN = "-m torch.distributed.run --nnodes=1:2 --nproc-per-node=1 --max-restarts=100 --rdzv-backend=c10d --rdzv-id=x"
RENDEZVOUS = "is_host=false,last_call_timeout=3"


@dataclass(frozen=True)
class Case:
    how: str
    """trainbus or plain."""
    timeout: float
    """Seconds, or 0 for torch's default."""
    struck: int | None
    """The rank whose machine vanishes; None if the link of rank 0 heals."""


CASES = (
    *(Case(how, TIMEOUT, struck) for struck in (1, 0, None) for how in ("trainbus", "plain")),
    Case("plain", 0.0, 1),
)
QUICK = (Case("trainbus", 5.0, 1),)


@dataclass
class Outcome:
    """What became of a training."""

    case: Case
    ended: float | None = None
    """Seconds from the cut to the error of the process that waited; None if it never ended."""
    named: bool = False
    """True if the error names the rank."""
    trained: float | None = None
    """Seconds from the cut to the end of the next iteration; None if there was none within ``UNTIL`` seconds."""
    lost: int = 0
    """Iterations that were done and had to be repeated."""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout  # noqa: S603, S607


def missing() -> str:
    """Return why there can be no namespaces here; empty if there can."""
    if not shutil.which("ip"):
        return "there is no ip (iproute2)"
    try:
        with network():
            return ""
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()


class Network:
    """Machines behind a bridge."""

    def __init__(self, name: str) -> None:
        self.name = name

    def space(self, machine: str) -> str:
        return f"{self.name}-{machine}"

    def link(self, machine: str, state: str) -> None:
        """Set the link of a machine ``up`` or ``down`` at the side of the bridge: the machine itself is not told."""
        ip("link", "set", self.space(machine), state)

    def kill(self, machine: str) -> None:
        while pids := ip("netns", "pids", self.space(machine)).split():
            for pid in pids:
                os.kill(int(pid), 9)
            time.sleep(0.05)


@contextmanager
def network() -> Iterator[Network]:
    found = Network(f"tb{os.getpid()}")
    with ExitStack() as stack:
        ip("link", "add", found.name, "type", "bridge")
        stack.callback(ip, "link", "del", found.name)
        ip("addr", "add", f"{NET}.254/24", "dev", found.name)
        ip("link", "set", found.name, "up")
        for number, machine in enumerate(MACHINES, 1):
            space = found.space(machine)
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
            ip("link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
            stack.callback(ip, "link", "del", space)  # a namespace may live on for a while
            ip("link", "set", space, "master", found.name, "up")
            ip("-n", space, "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            stack.callback(found.kill, machine)
        yield found


class Training:
    """Two agents, and what their processes have logged."""

    def __init__(self, where: Network, place: Path, case: Case) -> None:
        self._store = TCPStore(f"{NET}.254", 0, is_master=True, wait_for_workers=False)
        (place / "logs").mkdir()
        self._logs = place / "logs"
        variables = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            LOGS: str(self._logs),
        }
        (place / "saves").mkdir()
        for number, machine in enumerate(MACHINES, 1):
            (place / machine).mkdir()
            options = [
                f"--rdzv-endpoint={NET}.254:{self._store.port}",
                f"--rdzv-conf={RENDEZVOUS}",
                f"--local-addr={NET}.{number}",
            ]
            job = ["-m", "benchmarks.vanish_job", case.how, str(case.timeout), str(place / "saves")]
            inside = ["ip", "netns", "exec", where.space(machine)]
            with (place / f"{machine}.log").open("wb") as log:
                subprocess.Popen(  # noqa: S603
                    [*inside, sys.executable, *TORCHRUN.split(), *options, *job],
                    cwd=place / machine,
                    env=variables,
                    stdout=log,
                    stderr=log,
                )

    def lines(self, machine: str) -> list[dict[str, Any]]:
        """Return what the processes of a machine have logged, in order."""
        found = [line for file in self._logs.glob(f"{machine}-*") for line in file.read_text().splitlines(keepends=True)]
        return sorted((json.loads(line) for line in found if line.endswith("\n")), key=lambda line: float(line["at"]))

    def rank(self, machine: str) -> int | None:
        """Return the rank of the newest process of a machine, if it trains with the other one."""
        begins = [line for line in self.lines(machine) if "begins" in line]
        done = [line for line in self.lines(machine) if "done" in line]
        together = begins and done and begins[-1]["ranks"] == len(MACHINES) and done[-1]["at"] > begins[-1]["at"]
        return int(begins[-1]["rank"]) if together else None


def wait(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def cut(case: Case, place: Path) -> Outcome:
    """Cut a training, and wait until it goes on."""
    with network() as where:
        training = Training(where, place, case)
        if not wait(lambda: all(training.rank(one) is not None for one in MACHINES), PATIENCE):
            raise RuntimeError(f"{case} did not begin to train; see {place}")
        time.sleep(TRAINS)
        struck, survivor = sorted(MACHINES, key=lambda one: training.rank(one) != (case.struck or 0))
        at, outcome = time.time(), Outcome(case)
        where.link(struck, "down")
        if case.struck is None:
            time.sleep(HEALS)
            where.link(struck, "up")
            at += HEALS
        else:
            where.kill(struck)

        def since(what: str) -> list[dict[str, Any]]:
            # iterations that were under way at the cut end at once
            return [line for line in training.lines(survivor) if what in line and line["at"] > at + (case.struck is not None)]

        wait(lambda: since("done"), UNTIL)
        if failed := since("failed"):
            outcome.ended = failed[0]["at"] - at
            outcome.named = f"rank {case.struck or 0}" in failed[0]["failed"]
        if done := since("done"):
            outcome.trained = done[0]["at"] - at
            before = [line["done"] for line in training.lines(survivor) if "done" in line and line["at"] < done[0]["at"]]
            outcome.lost = before[-1] + 1 - done[0]["done"]
        return outcome


def run(*, quick: bool) -> list[Outcome]:
    """Cut the links; return the outcomes, or none where there are no namespaces."""
    if why := missing():
        print(f"without the scene of a machine that vanishes: {why}")
        return []
    outcomes = []
    for case in QUICK if quick else CASES:
        place = Path(tempfile.mkdtemp(prefix="trainbus-vanish-"))
        outcomes.append(outcome := cut(case, place))
        print(outcome, flush=True)
        if case.how == "trainbus":
            check(outcome, place)
        shutil.rmtree(place)
    return outcomes


def check(outcome: Outcome, place: Path) -> None:
    """Check what trainbus promises."""
    heals = outcome.case.struck is None
    if outcome.trained is None or (outcome.lost if heals else not outcome.named) or (heals and outcome.ended is not None):
        sys.exit(f"lost: {outcome} (all files are in {place})")


def table(outcomes: list[Outcome]) -> Table:
    grid = Table(title="A machine vanishes with its link", title_justify="left", title_style="bold")
    for heading in ("", "timeout", "s to the error", "names the rank", "s to training", "lost"):
        grid.add_column(heading, justify="right" if heading else "left")
    for one in outcomes:
        what = f"a cut of {HEALS:.0f} s" if one.case.struck is None else f"the machine of rank {one.case.struck}"
        grid.add_row(
            f"{one.case.how}: {what}",
            f"{one.case.timeout:.0f} s" if one.case.timeout else "torch's",
            "-" if one.ended is None else f"{one.ended:.1f}",
            "-" if one.ended is None else ("yes" if one.named else "no"),
            f"more than {UNTIL:.0f}" if one.trained is None else f"{one.trained:.1f}",
            str(one.lost),
        )
    return grid


def as_json(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    return [asdict(one) for one in outcomes]
