"""PyTorch Ignite: Engine events, and the Engine with its EMA, schedule and checkpoint handlers."""

import io
import json
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
from ignite.engine import Engine, Events
from ignite.handlers import BasicTimeProfiler, Checkpoint, DiskSaver, EMAHandler, HandlersTimeProfiler, LRScheduler
from torch import Tensor

from benchmarks.digits import MOMENTUM, Batch, Job
from benchmarks.peers import ALL_HANDLERS, BY_NAME, Profiled, Report, Statement, Told, no_op_handlers

CHECKPOINTS = "*.pt"
SCALARS = "scalars.jsonl"


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    engine = Engine(lambda engine, batch: None)
    for handler in no_op_handlers(handlers):
        engine.add_event_handler(Events.ITERATION_COMPLETED, handler)
    # What Engine.run itself calls; the public fire_event also checks the name of the event.
    return Statement("trainer._fire_event(Events.ITERATION_COMPLETED)", {**names, "trainer": engine, "Events": Events})


def train(job: Job, work_dir: Path, profiler: BasicTimeProfiler | HandlersTimeProfiler | None = None) -> None:
    optimizer = job.optimizer()
    schedule = LRScheduler(job.scheduler(optimizer))

    def update(engine: Engine, batch: Batch) -> float:
        loss = job.loss(job.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    average = EMAHandler(job.model, momentum=MOMENTUM)
    average.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
    to_save = {
        "model": job.model,
        "average": average.ema_model,
        "optimizer": optimizer,
        "scheduler": schedule,
        "trainer": trainer,
    }
    checkpoint = Checkpoint(to_save, DiskSaver(str(work_dir), require_empty=False), n_saved=None)

    # Ignite has no logger that writes to a plain file; its documentation logs from a handler.
    with (work_dir / SCALARS).open("w") as scalars:

        @trainer.on(Events.ITERATION_COMPLETED)
        def write_scalars(engine: Engine) -> None:
            line = {"iter": engine.state.iteration, "loss": engine.state.output, "lr": optimizer.param_groups[0]["lr"]}
            scalars.write(json.dumps(line) + "\n")

        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=job.checkpoint_interval), checkpoint)
        if profiler is not None:
            profiler.attach(trainer)
        trainer.run(job.loader(), max_epochs=job.epochs)


def profiled(kind: type[BasicTimeProfiler] | type[HandlersTimeProfiler], job: Job, work_dir: Path) -> Report:
    profiler = kind()
    train(job, work_dir, profiler)
    return partial(printed, profiler)


def printed(profiler: BasicTimeProfiler | HandlersTimeProfiler) -> str:
    with redirect_stdout(io.StringIO()) as text:
        profiler.print_results(profiler.get_results())
    return text.getvalue()


PROFILERS = {
    "BasicTimeProfiler": Profiled(partial(profiled, BasicTimeProfiler), Told(ALL_HANDLERS, ALL_HANDLERS)),
    "HandlersTimeProfiler": Profiled(
        partial(profiled, HandlersTimeProfiler),
        Told(BY_NAME, "as a wrapper", shows=("write_scalars", "wrapper"), hides=("Checkpoint",)),
    ),
}


def weights(path: Path) -> Iterable[Tensor]:
    return torch.load(path, weights_only=False)["model"].values()
