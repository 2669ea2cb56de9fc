"""Count the files and functions that an event, an iteration, a checkpoint, a resume and a command pass through.

All of trainbus counts: a function that is called between the two ends of the way, on any thread, and its file. An import alone
does not count, nor do comprehensions and lambdas. It fails beyond the limits, which are the best figures so far.

    python .ci/count_files.py            # each way
    python .ci/count_files.py --files    # with its files
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from operator import gt
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import trainbus
from trainbus import Bus, CheckpointHook, EMAHook, LoggerHook, OptimizerHook, Progress, Run, TrainLoop, attach
from trainbus.eventloop.events import AfterTrainIter, CheckpointCommitted

ROOT = Path(trainbus.__file__).resolve().parent.parent
PARTS = ("<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


@cache
def real(path: str) -> Path:
    """Return where a file is: the engine and the hooks are links in ``trainbus/``."""
    return Path(path).resolve()


class Way:
    """Record trainbus's functions that are called in a block, by file and in order, on all threads."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, None]] = {}
        self.followed = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.followed:
            return
        code = frame.f_code
        file = real(code.co_filename)
        body = not code.co_flags & inspect.CO_OPTIMIZED  # of a module or a class
        if body or code.co_name in PARTS or not file.is_relative_to(ROOT):
            return
        name = file.relative_to(ROOT).as_posix()
        if name.startswith(("eventloop/", "hooks/", "trainbus/")) and name != "eventloop/lazy.py":  # which imports
            self.files.setdefault(name, {})[code.co_qualname] = None

    @property
    def functions(self) -> int:
        return sum(map(len, self.files.values()))

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
    """Follow the second checkpoint of a run from ``run.checkpoints.save`` to its event, while training waits for it."""
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
                    run.checkpoints.save(f"asked_{i}")
    return way


def trained(folder: Path, way: Way, *, epochs: int, resume: str | None = None) -> TrainLoop:
    """Return a loop with an average, checkpoints and an update, that has trained on one batch an epoch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus = Bus(EMAHook(), CheckpointHook(interval=100), OptimizerHook())

    @bus.on("before_train", priority=0)
    def begin(event: Any) -> None:
        if resume is not None:
            way.followed = False

    @bus.on("before_train_iter", priority=0)
    def first(event: Any) -> None:
        way.followed = resume is None and event.batch_idx == 2

    @bus.on("after_train_iter", priority=100)
    def last(event: Any) -> None:
        way.followed = False

    data = [torch.ones(2, 4)] * 4
    loop = TrainLoop(
        model,
        optimizer,
        step=lambda model, batch: model(batch).sum(),
        train_data=data,
        bus=bus,
        max_epochs=epochs,
        work_dir=folder,
    )
    way.followed = resume is not None
    loop.run(resume=resume)
    return loop


def iteration() -> Way:
    """Follow the third iteration of a ``TrainLoop`` between its first and its last handler."""
    way = Way()
    with tempfile.TemporaryDirectory() as folder, way.watching(threads=False):
        trained(Path(folder) / "run", way, epochs=1)
    return way


def resume() -> Way:
    """Follow ``loop.run(resume="auto")`` from its checkpoint to ``before_train``."""
    way = Way()
    with tempfile.TemporaryDirectory() as folder:
        trained(Path(folder) / "run", Way(), epochs=1)
        with way.watching(threads=False):
            trained(Path(folder) / "run", way, epochs=2, resume="auto")
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
        with way.watching(threads=False), attach(bus, trainer):
            trainer.callbacks = [Begins(), *trainer.callbacks, Ends()]
            trainer.fit(Module(), torch.utils.data.DataLoader([torch.ones(2, 4)] * 4, batch_size=None))
    return way


def command() -> Way:
    """Follow ``trainbus run`` to the first batch."""
    way = Way()

    def stop(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "step" and frame.f_code.co_filename.endswith("demo.py"):
            way.followed = False
            raise KeyboardInterrupt
        way(frame, event, argument)

    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, way.watching():
        os.chdir(folder)
        listed, sys.argv = sys.argv, ["trainbus", "run", str(ROOT / "examples" / "digits.toml"), "loop.max_epochs=1"]
        way.followed = True
        sys.setprofile(stop)
        try:
            trainbus.main()
        except (KeyboardInterrupt, SystemExit):
            if way.followed:
                sys.exit("the command ended before its first batch")
        finally:
            os.chdir(here)
            sys.argv = listed
    return way


def fewest(follow: Callable[[], Way]) -> Way:
    """Return the shortest of three ways: in some a consumer sleeps just then, and is woken."""
    return min((follow() for _ in range(3)), key=lambda way: way.functions)


def report(name: str, way: Way, limit: tuple[int, int], goal: tuple[int, int]) -> bool:
    """Print the length of a way, with its files if that is wanted; return False beyond ``limit``."""
    length = len(way.files), way.functions
    missed = any(map(gt, length, goal))
    said = f", goal {goal[0]}, {goal[1]}: MISSED" if missed else ""
    print(f"{name}: {length[0]} files, {length[1]} functions; limit {limit[0]}, {limit[1]}{said}")
    for file, functions in way.files.items() if "--files" in sys.argv else ():
        print(f"    {file}: {', '.join(functions)}")
    return not any(map(gt, length, limit))


if __name__ == "__main__":
    good = [
        report("an event, from publish to its handler", event(), (7, 20), (7, 20)),
        report("an event, to an async handler", event(is_async=True), (7, 31), (7, 31)),
        report("an event with capture=", event(capture=lambda one: one.outputs["loss"]), (7, 30), (7, 30)),
        report("an iteration of a TrainLoop", iteration(), (10, 25), (12, 27)),
        report("a checkpoint, from checkpoints.save to its event", checkpoint(), (27, 176), (12, 90)),
        report("a resume, to before_train", resume(), (77, 367), (25, 130)),
        *(
            [report("a step of an attached Lightning trainer", fewest(attached_step), (12, 31), (12, 31))]
            if find_spec("lightning")
            else []
        ),
        report("trainbus run, to the first batch", command(), (119, 527), (60, 350)),
    ]
    sys.exit(not all(good))
