"""PyTorch Ignite: Engine events, and the Engine with its EMA, schedule and checkpoint handlers."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler, LRScheduler
from torch import Tensor

from benchmarks.digits import MOMENTUM, Batch, Job
from benchmarks.peers import Statement, no_op_handlers

CHECKPOINTS = "*.pt"
SCALARS = "scalars.jsonl"


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    engine = Engine(lambda engine, batch: None)
    for handler in no_op_handlers(handlers):
        engine.add_event_handler(Events.ITERATION_COMPLETED, handler)
    # What Engine.run itself calls; the public fire_event also checks the name of the event.
    return Statement("trainer._fire_event(Events.ITERATION_COMPLETED)", {**names, "trainer": engine, "Events": Events})


def train(job: Job, work_dir: Path) -> None:
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
        trainer.run(job.loader(), max_epochs=job.epochs)


def weights(path: Path) -> Iterable[Tensor]:
    return torch.load(path, weights_only=False)["model"].values()
