"""A disk that notes what is done to it, and fails or loses its power; and a training whose every number tells its step."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from trainbus.eventloop import Bus, TrainLoop
from trainbus.eventloop.checkpoint import TEMPORARY_PREFIX, load, verify
from trainbus.eventloop.training.folders import LOCK
from trainbus.eventloop.training.saves.discover import find_checkpoint
from trainbus.hooks import CheckpointHook

# --------------------------------------------------------------------------------------------------------- the disk


class Operation(msgspec.Struct, frozen=True):
    """What was done below the root; ``told`` is no operation but a handler that was told of durable files."""

    kind: str
    path: str = ""
    target: str = ""
    inode: int = 0
    data: bytes = b""
    names: tuple[str, ...] = ()


class Disk:
    """Stands between the code and the files below ``root``: counts operations, notes them, and can fail them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.log: list[Operation] = []
        self.count = 0
        self.failed = ""
        self.error = 0
        self._fail_at = -1
        self._room: int | None = None
        self._piece: int | None = None
        self._inodes = itertools.count(1)
        self._opened: dict[int, tuple[str, int]] = {}  # descriptor → path, inode (0: a directory, or open for reading)
        self._lock = threading.RLock()
        for name in ("open", "write", "fsync", "fdatasync", "close", "replace", "rename", "link", "unlink", "remove", "mkdir"):
            monkeypatch.setattr(os, name, self._before(name, getattr(os, name)))
        monkeypatch.setattr(os, "writev", lambda descriptor, parts: os.write(descriptor, b"".join(parts)))

    def fail(self, at: int, error: int) -> None:
        """Have the operation number ``at`` from here fail with an errno."""
        self._fail_at, self.error, self.failed = self.count + at, error, ""

    def fill_up(self, room: int, piece: int | None = None, error: int = 0) -> None:
        """Take so many bytes more, at most ``piece`` at a time, and then none."""
        self._room, self._piece, self.error, self.failed = room, piece, error, ""

    def heal(self) -> None:
        self._fail_at, self._room, self._piece = -1, None, None

    def told(self, names: Iterable[str]) -> None:
        """Note at this place in the log that files were said to be durable."""
        with self._lock:
            self.log.append(Operation("told", names=tuple(Path(name).name for name in names)))

    def _before(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(what: Any, *args: Any, **options: Any) -> Any:
            concerned = what in self._opened if isinstance(what, int) else Path(what).is_relative_to(self.root)
            if not concerned:
                return real(what, *args, **options)
            with self._lock:
                self.count += 1
                if self.count - 1 == self._fail_at:
                    self._refuse(name, what, real)
                if name == "write":
                    return self._write(real, what, *args)
                done = real(what, *args, **options)
                self._note(name, what, done, *args)
                return done

        return operation

    def _refuse(self, name: str, what: Any, real: Callable[..., Any]) -> None:
        self.failed = name
        if name == "close":  # the descriptor is gone even then
            real(what)
            del self._opened[what]
        raise OSError(self.error, os.strerror(self.error))

    def _write(self, real: Callable[..., Any], descriptor: int, data: Any) -> int:
        if self._room is not None:
            if not self._room:
                self.failed = "write"
                raise OSError(self.error, os.strerror(self.error))
            data = data[: min(self._room, self._piece or self._room)]
        written: int = real(descriptor, data)
        if self._room is not None:
            self._room -= written
        if inode := self._opened[descriptor][1]:
            self.log.append(Operation("write", inode=inode, data=bytes(data[:written])))
        return written

    def _note(self, name: str, what: Any, done: Any, *args: Any) -> None:
        if name == "open":
            kept = args[0] & os.O_CREAT and Path(what).name != LOCK  # a lock need not outlive a power cut
            inode = next(self._inodes) if kept else 0
            self._opened[done] = (str(what), inode)
            if inode:
                self.log.append(Operation("create", str(what), inode=inode))
        elif name == "close":
            del self._opened[what]
        elif name in ("fsync", "fdatasync"):
            path, inode = self._opened[what]
            self.log.append(Operation("sync", path, inode=inode))
        elif name in ("replace", "rename", "link"):
            self.log.append(Operation("link" if name == "link" else "rename", str(what), str(args[0])))
        elif Path(what).name != LOCK:
            self.log.append(Operation("mkdir" if name == "mkdir" else "unlink", str(what)))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    return Disk(monkeypatch, tmp_path)


# ---------------------------------------------------------------------------------------------------- the power cut

_ABSENT = 0
_DIRECTORY = -1
Files = dict[str, bytes | None]  # None: a directory


class _Inode:
    def __init__(self) -> None:
        self.synced = b""
        self.writes: list[bytes] = []

    def contents(self) -> list[bytes]:
        """What may be read after a power cut: bytes that were not synced are there, cut off anywhere, or zeros."""
        if not self.writes:
            return [self.synced]
        lost = b"".join(self.writes)
        cuts = {0, 1, len(lost) // 2, len(lost) - 1, len(lost), *itertools.accumulate(map(len, self.writes))}
        middle = len(lost) // 2
        found = [lost[:cut] for cut in cuts] + [
            bytes(len(lost)),
            bytes(middle) + lost[middle:],
            lost[:middle] + bytes(len(lost) - middle),
        ]
        return [self.synced + rest for rest in dict.fromkeys(found)]


class PowerCut:
    """Replays operations as a file system that owes nothing but what was synced.

    Entries of a directory that was not synced since they changed may be the old or the new ones, each by itself (a rename is
    two of them); a new directory is an entry of its parent.
    """

    def __init__(self) -> None:
        self.inodes: dict[int, _Inode] = {}
        self.now: dict[str, int] = {}
        self.maybe: dict[str, list[int]] = {}  # for each name what it may be, oldest first; only those with a choice

    def apply(self, operation: Operation) -> None:
        kind, path, target = operation.kind, operation.path, operation.target
        if kind == "create":
            self.inodes[operation.inode] = _Inode()
            self._bind(path, operation.inode)
        elif kind == "write":
            self.inodes[operation.inode].writes.append(operation.data)
        elif kind == "sync" and operation.inode:
            inode = self.inodes[operation.inode]
            inode.synced, inode.writes = inode.synced + b"".join(inode.writes), []
        elif kind == "sync":
            self.maybe = {name: choice for name, choice in self.maybe.items() if str(Path(name).parent) != path}
        elif kind == "rename":
            self._bind(target, self.now[path])
            self._bind(path, _ABSENT)
        elif kind == "link":
            self._bind(target, self.now[path])
        elif kind == "mkdir":
            self._bind(path, _DIRECTORY)
        elif kind == "unlink":
            self._bind(path, _ABSENT)

    def _bind(self, path: str, inode: int) -> None:
        self.maybe.setdefault(path, [self.now.get(path, _ABSENT)]).append(inode)
        self.now[path] = inode

    def states(self) -> Iterator[Files]:
        """All that may be found after a power cut at this moment."""
        names = sorted(self.now)
        choices = [list(dict.fromkeys(self.maybe.get(name, [self.now[name]]))) for name in names]
        for chosen in itertools.product(*choices):
            entries = {name: inode for name, inode in zip(names, chosen, strict=True) if inode != _ABSENT}
            lost = [name for name in self.now if self.now[name] == _DIRECTORY and name not in entries]
            there = {name: inode for name, inode in entries.items() if not any(Path(name).is_relative_to(one) for one in lost)}
            yield from self._with_contents(there)

    def _with_contents(self, entries: dict[str, int]) -> Iterator[Files]:
        unsure = [inode for inode in dict.fromkeys(entries.values()) if inode > 0 and self.inodes[inode].writes]
        for contents in itertools.product(*(self._contents(inode, entries) for inode in unsure)):
            found = dict(zip(unsure, contents, strict=True))
            yield {
                name: None if inode == _DIRECTORY else found.get(inode, self.inodes[inode].synced)
                for name, inode in entries.items()
            }

    def _contents(self, inode: int, entries: dict[str, int]) -> list[bytes]:
        contents = self.inodes[inode].contents()
        hidden = all(Path(name).name.startswith(TEMPORARY_PREFIX) for name, one in entries.items() if one == inode)
        return contents[:1] if hidden else contents  # temporary files are never read


@pytest.fixture
def power_cut() -> type[PowerCut]:
    return PowerCut


# ----------------------------------------------------------------------------------------------------- the training

STEPS, KEEP = 6, 2


class Counting(torch.nn.Module):
    """After t steps every weight is t, and every number of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(300, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(50))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return -self.weight.sum()


class Score:
    """Validations are made after each step; all but the fourth are the best so far."""

    def __init__(self, seen: torch.Tensor) -> None:
        self.seen = seen

    def update(self) -> None: ...

    def reset(self) -> None: ...

    def compute(self) -> float:
        return float(self.seen[0]) if self.seen[0] != 4 else 0.0


class Job:
    """Trains ``STEPS`` steps with a checkpoint after each, of which two stay, and the best."""

    STEPS, KEEP = STEPS, KEEP

    def loop(
        self, work_dir: Path, told: Callable[[list[str]], Any] | None = None, *, steps: int = STEPS, **options: Any
    ) -> TrainLoop:
        torch.manual_seed(0)
        model = Counting()
        bus = Bus(CheckpointHook(1, by_epoch=False, max_keep_ckpts=KEEP, save_best="score", rule="greater", **options))
        if told is not None:  # before anything is deleted
            bus.on("checkpoint_committed", lambda event: told(event.names), priority=0)
        return TrainLoop(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            step=lambda model, batch: model(batch),
            train_data=[torch.zeros(1)] * 2,
            val_data=[torch.zeros(1)],
            val_interval=1,
            metrics={"score": Score(model.seen)},
            bus=bus,
            max_iters=steps,
            work_dir=work_dir,
        )

    def resume(self, work_dir: Path) -> int:
        """Train to the end from the newest checkpoint, and return the step that it was of."""
        loop, began = self.loop(work_dir), []
        loop.bus.on("before_train", lambda event: began.append(event.progress.iter))
        loop.run(resume="auto")
        assert (loop.model.weight == STEPS).all()
        return began[0]

    @staticmethod
    def step_of(path: Path) -> int:
        """Read a checkpoint, see that it is the state of one step, and return which."""
        verify(path)
        state = load(path)
        step: int = state["progress"]["iter"]
        assert (state["state_dict"]["weight"] == step).all(), path
        assert (state["state_dict"]["seen"] == step).all(), path
        assert step == int(path.stem.rpartition("_")[2]), path
        return step

    def check(self, directory: Path, told: Iterable[str]) -> int:
        """See that every file is good and none that was told of is missing but by retention; return the step to go on from."""
        steps = {path.name: self.step_of(path) for path in directory.glob("*.safetensors")}
        for name in set(told) - steps.keys():
            kind, _, number = name.removesuffix(".safetensors").rpartition("_")
            newer = [one for one in steps if one.startswith(kind) and steps[one] > int(number)]
            assert len(newer) >= (KEEP if kind == "iter" else 1), (name, steps)
        found = find_checkpoint(directory) if directory.is_dir() else None
        newest = 0 if found is None else found[1]["progress"]["iter"]
        assert newest >= max((int(name[5:-12]) for name in told if name.startswith("iter_")), default=0)
        return newest


@pytest.fixture
def job() -> Job:
    return Job()
