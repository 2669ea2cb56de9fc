"""trainbus: Bus.publish, its ExponentialMovingAverage, and TrainLoop with the hooks of the house."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from benchmarks.digits import CHECKPOINT_INTERVAL, MOMENTUM, Job
from benchmarks.harness import SUBJECT
from benchmarks.peers import Statement, direct, no_op_handlers
from eventloop import Bus, TrainLoop
from hooks import (
    CheckpointHook,
    EMAHook,
    ExponentialMovingAverage,
    JSONLinesWriter,
    LoggerHook,
    ParamSchedulerHook,
    RuntimeInfoHook,
)

CHECKPOINTS = "*.safetensors"
SCALARS = "**/scalars.jsonl"


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    bus = Bus()
    for handler in no_op_handlers(handlers):
        bus.on("after_train_iter", handler)
    event = "event" if handlers else direct.CONSTRUCT
    # Open, as it is while a run is under way.
    return Statement(f"bus.publish({event})", {**names, "bus": bus}, scope=bus)


def ema(model: nn.Module, momentum: float) -> dict[str, Callable[[], None]]:
    average = ExponentialMovingAverage(model, momentum=momentum)
    return {SUBJECT: lambda: average.update_parameters(model)}


def train(job: Job, work_dir: Path) -> None:
    optimizer = job.optimizer()
    bus = Bus()
    bus.add(
        RuntimeInfoHook(),  # reports the learning rate
        EMAHook(momentum=MOMENTUM),
        LoggerHook(interval=1, writers=[JSONLinesWriter()]),
        ParamSchedulerHook(job.scheduler(optimizer), by="iter"),
        CheckpointHook(interval=CHECKPOINT_INTERVAL, by_epoch=False),
    )
    loop = TrainLoop(
        job.model,
        optimizer,
        step=job.loss,
        train_data=job.loader(),
        bus=bus,
        max_iters=job.iterations,
        work_dir=work_dir,
    )
    loop.run()
