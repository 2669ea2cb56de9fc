"""Count the files that an event, a checkpoint, an attached step and ``trainbus run`` pass through; fail beyond the limits.

A file counts if one of its functions is called between the two ends of the way. An import alone does not count. For a command,
files of what the configuration creates are listed separately.

    python .ci/count_files.py            # each way with its files
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import trainbus
from trainbus import Bus, CheckpointHook, EMAHook, LoggerHook, Progress, Run
from trainbus.eventloop.events import AfterTrainIter, CheckpointCommitted

ROOT = Path(trainbus.__file__).resolve().parent.parent
COMMAND = (
    "trainbus/__init__.py",
    "trainbus/cli/",
    "trainbus/config/",
    *(f"eventloop/training/{name}.py" for name in ("loop", "host", "run", "session", "driver", "state", "iterators", "data")),
)


@cache
def real(path: str) -> Path:
    """Return where a file is: the engine and the hooks are links in ``trainbus/``."""
    return Path(path).resolve()


class Way:
    """Record trainbus's files whose functions are called in a block, in order, on all threads."""

    def __init__(self, rooms: tuple[str, ...] = ("",)) -> None:
        self.files: dict[str, list[str]] = {}
        self.others: dict[str, list[str]] = {}
        self.followed = False
        self._rooms = rooms

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.followed:
            return
        code = frame.f_code
        file = real(code.co_filename)
        body = not code.co_flags & inspect.CO_OPTIMIZED  # of a module or a class
        if body or not file.is_relative_to(ROOT):
            return
        name = file.relative_to(ROOT).as_posix()
        if name.startswith(("eventloop/", "hooks/", "trainbus/")):
            found = self.files if name.startswith(self._rooms) else self.others
            found.setdefault(name, []).append(code.co_qualname)

    @contextmanager
    def watching(self, *, threads: bool = True) -> Iterator[None]:
        if threads:  # those that begin in the block, too
            threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def event(*, is_async: bool = False, **options: Any) -> Way:
    """Follow an event from ``publish`` to its offloaded handler, whose consumer sleeps after an event before."""
    way, bus, done = Way(), Bus(), threading.Event()

    def handler(what: object) -> None:
        if way.followed:
            way.followed = False
            done.set()

    async def async_handler(what: object) -> None:
        handler(what)

    if is_async:
        bus.on("after_train_iter", async_handler, **options)
    else:
        bus.on("after_train_iter", handler, offload="thread", **options)

    def made(i: int) -> AfterTrainIter:
        return AfterTrainIter(progress=Progress(iter=i), batch_idx=i, outputs={"loss": torch.zeros(())})

    with way.watching(), bus:
        bus.publish(made(0))
        bus.drain()
        time.sleep(0.1)  # the consumer sleeps, and has to be woken
        second = made(1)
        way.followed = True
        bus.publish(second)
        done.wait()
    return way


def checkpoint() -> Way:
    """Follow the second checkpoint of a run from ``run.request_save`` to its event, while training waits for it."""
    way, bus, model, saved = Way(), Bus(), nn.Linear(4, 4), threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus.add(CheckpointHook(interval=100))

    @bus.on(CheckpointCommitted)
    def committed(event: CheckpointCommitted) -> None:
        way.followed = False
        saved.set()

    with (
        way.watching(),
        tempfile.TemporaryDirectory() as folder,
        Run(bus, model=model, optimizer=optimizer, work_dir=folder) as run,
    ):
        for _ in run.epochs(1):
            for i, batch in enumerate(run.train([torch.ones(2, 4)] * 4)):
                if i in (1, 3):
                    saved.wait(60)
                    saved.clear()
                model(batch).sum().backward()
                optimizer.step()
                if i in (0, 2):
                    way.followed = i == 2
                    run.request_save(f"asked_{i}")
    return way


def attached_step() -> Way:
    """Follow one step of a Lightning trainer with a bus, an average and a logger that is due, on the training thread.

    On a slow machine the logger's thread writes earlier lines within the step.
    """
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Begins(lightning.Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            way.followed = arguments[-1] == 2

    class Ends(lightning.Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            way.followed = False

    way, bus = Way(), Bus(EMAHook(), LoggerHook(interval=1))
    silent: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, **silent)
        with way.watching(threads=False), bus.attach(trainer):
            trainer.callbacks = [Begins(), *trainer.callbacks, Ends()]
            trainer.fit(Module(), torch.utils.data.DataLoader([torch.ones(2, 4)] * 4, batch_size=None))
    return way


def command() -> Way:
    """Follow ``trainbus run`` to the first batch."""
    way = Way(COMMAND)

    def stop(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "step" and frame.f_code.co_filename.endswith("demo.py"):
            way.followed = False
            raise KeyboardInterrupt
        way(frame, event, argument)

    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, way.watching():
        os.chdir(folder)
        sys.argv = ["trainbus", "run", str(ROOT / "examples" / "digits.toml"), "loop.max_epochs=1"]
        way.followed = True
        sys.setprofile(stop)
        try:
            trainbus.main()
        except (KeyboardInterrupt, SystemExit):
            if way.followed:
                sys.exit("the command ended before its first batch")
        finally:
            os.chdir(here)
    return way


def report(name: str, way: Way, limit: int, goal: int | None = None) -> bool:
    """Print the files of a way; return False if there are more than ``limit``: the goal, or the best figure so far."""
    print(f"{name}: {len(way.files)} files, limit {limit}" + (f", goal {goal}: MISSED" if goal else ""))
    for file, functions in way.files.items():
        print(f"    {file}: {', '.join(list(dict.fromkeys(functions))[:4])}")
    if way.others:
        print(f"  beside it: {', '.join(way.others)}")
    return len(way.files) <= limit


if __name__ == "__main__":
    good = [
        report("an event, from publish to its handler", event(), 7),
        report("an event, to an async handler", event(is_async=True), 7),
        report("an event with capture=", event(capture=lambda one: one.outputs["loss"]), 7),
        report("a checkpoint, from request_save to its event", checkpoint(), 23),
        *([report("a step of an attached Lightning trainer", attached_step(), 12)] if find_spec("lightning") else []),
        report("trainbus run, to the first batch", command(), 15, goal=12),
    ]
    sys.exit(not all(good))
