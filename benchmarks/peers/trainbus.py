"""trainbus: Bus.publish, its ExponentialMovingAverage, and TrainLoop with its own hooks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.digits import MOMENTUM, Job
from benchmarks.harness import SUBJECT
from benchmarks.peers import (
    BY_NAME,
    HandOff,
    HandOffs,
    Logged,
    Logs,
    Profiled,
    Receive,
    Report,
    Resume,
    Saver,
    Statement,
    Told,
    Trained,
    direct,
    no_op_handlers,
)
from trainbus.eventloop import Bus, Event, Hook, Run, TrainLoop
from trainbus.eventloop.checkpoint import AsyncSaver, load
from trainbus.eventloop.events import AfterTrainIter
from trainbus.hooks import (
    CheckpointHook,
    EMAHook,
    ExponentialMovingAverage,
    JSONLinesWriter,
    LoggerHook,
    ParamSchedulerHook,
    RuntimeInfoHook,
    TensorBoardWriter,
    Writer,
)
from trainbus.observe import RunRecordHook

CHECKPOINTS = "*.safetensors"
SCALARS = "**/scalars.jsonl"


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    bus = Bus()
    for handler in no_op_handlers(handlers):
        bus.on("after_train_iter", handler)
    event = "event" if handlers else direct.CONSTRUCT
    # Open, as it is while a run is under way.
    return Statement(f"bus.publish({event})", {**names, "bus": bus}, scope=bus)


class Published(Event):
    """An event of plain fields, which goes into a lane as it is."""

    at: int


def offload() -> Mapping[str, HandOffs]:
    lanes = {
        f"{SUBJECT}, thread lane": partial(thread_lane, {}),
        f"{SUBJECT}, async lane": partial(async_lane, {}),
        f"{SUBJECT}, thread lane, linger=0": partial(thread_lane, {"linger": 0}),
        f"{SUBJECT}, async lane, linger=0": partial(async_lane, {"linger": 0}),
    }
    return lanes | {f"{SUBJECT}, the lane alone": lane_alone}


@contextmanager
def thread_lane(options: Mapping[str, Any], receive: Receive) -> Iterator[HandOff]:
    bus = Bus()
    bus.on(Published, receive, offload="thread", **options)
    with bus:
        yield HandOff(bus.publish, make=published)


@contextmanager
def async_lane(options: Mapping[str, Any], receive: Receive) -> Iterator[HandOff]:
    async def handle(event: Published) -> None:
        receive(event)

    bus = Bus()
    bus.on(Published, handle, **options)
    with bus:
        yield HandOff(bus.publish, make=published)


@contextmanager
def lane_alone(receive: Receive) -> Iterator[HandOff]:
    """Hand over to the lane directly, without ``bus.publish`` and the route."""
    bus = Bus()
    subscription = bus.on(Published, receive, offload="thread")
    with bus:
        yield HandOff(subscription.call_for(Published), make=published)


def published(at: int) -> Published:
    return Published(at=at)


def busy_handler(event: Published) -> None:
    """Run about 0.5 ms of Python; at the top level of a module, so that another process can import it."""
    count(BUSY_COUNT)


async def busy_async_handler(event: Published) -> None:
    busy_handler(event)


BUSY_COUNT = 10_000


def count(number: int) -> int:
    """Run Python without releasing the GIL."""
    total = 0
    for i in range(number):
        total += i & 7
    return total


def ema(model: nn.Module, momentum: float) -> dict[str, Callable[[], None]]:
    average = ExponentialMovingAverage(model, momentum=momentum)
    return {SUBJECT: lambda: average.update_parameters(model)}


HOOKS = ("RuntimeInfoHook", "EMAHook", "LoggerHook", "ParamSchedulerHook", "CheckpointHook")


def make(name: str, job: Job, optimizer: torch.optim.Optimizer, saving: Mapping[str, Any]) -> Hook:
    match name:
        case "RuntimeInfoHook":
            return RuntimeInfoHook()  # reports the learning rate
        case "EMAHook":
            return EMAHook("ExponentialMovingAverage", momentum=MOMENTUM)  # without warm-up, as the peers
        case "LoggerHook":
            return LoggerHook(interval=1, writers=[JSONLinesWriter()])
        case "ParamSchedulerHook":
            return ParamSchedulerHook(job.scheduler(optimizer), by="iter")
        case "RunRecordHook":
            return RunRecordHook()
        case _:
            return CheckpointHook(interval=job.checkpoint_interval, by_epoch=False, save_last=False, **saving)


def train(job: Job, work_dir: Path, hooks: Iterable[str] = HOOKS, *, timing: bool = False, **saving: Any) -> Bus:
    """Train with the hooks of these names, and options of the CheckpointHook; return the bus."""
    optimizer = job.optimizer()
    bus = Bus(timing=timing)
    bus.add(*(make(name, job, optimizer, saving) for name in hooks))
    loop = TrainLoop(
        job.model,
        optimizer,
        step=job.loss,
        train_data=job.loader(),
        bus=bus,
        work_dir=work_dir,
        **length(job),
    )
    loop.run()
    return bus


def told(train: Callable[[Job, Path], Bus], job: Job, work_dir: Path) -> Report:
    bus = train(job, work_dir)
    return lambda: str(bus.costs())


_SHOWN = ("LoggerHook", "CheckpointHook", "copying for checkpoints")
_TOLD = Told(BY_NAME, BY_NAME, shows=("LoggerHook", "CheckpointHook", "copying for checkpoints"))
PROFILERS = {
    SUBJECT: Profiled(partial(told, partial(train, timing=True)), _TOLD),
    f"{SUBJECT} + record": Profiled(partial(told, partial(train, hooks=(*HOOKS, "RunRecordHook"))), _TOLD),
}


def train_own_loop(job: Job, work_dir: Path) -> None:
    """Train in an own loop around ``run.train()``, without hooks."""
    optimizer = job.optimizer()
    loader = job.loader()
    with Run(Bus(), model=job.model, optimizer=optimizer, work_dir=work_dir) as run:
        for _ in run.epochs(job.epochs):
            for batch in run.train(loader):
                loss = job.loss(job.model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.report(loss=loss)


def length(job: Job) -> dict[str, int]:
    return {"max_epochs": job.epochs} if job.epochs > 1 else {"max_iters": job.iterations}


def weights(path: Path) -> Iterable[Tensor]:
    # With an average, "state_dict" holds it, as in MMEngine.
    return load(path)["ema_state_dict"].values()


@contextmanager
def savers(model: nn.Module, work_dir: Path) -> Iterator[Saver]:
    """Save by the engine, without the hook."""
    weights = model.state_dict()
    with closing(AsyncSaver()) as saver:
        yield Saver(lambda path: saver.save(weights, path), lambda path: load(path).values(), saver.wait, background=True)


SAVERS = {SUBJECT: savers}


def save_both(trained: Trained, path: Path) -> None:
    model, optimizer = trained
    with Run(Bus(), model=model, optimizer=optimizer, work_dir=path.parent) as run:
        for _ in run.iterations(1):
            optimizer.step()
            run.checkpoints.save(path.name)


def resume(trained: Trained, path: Path) -> None:
    model, optimizer = trained
    with Run(Bus(), model=model, optimizer=optimizer, work_dir=path.parent, resume=path):
        pass


RESUMES = {SUBJECT: Resume(save_both, resume)}
STORES = SAVERS


def logs(writer: Callable[[], Writer]) -> Logs:
    @contextmanager
    def prepared(work_dir: Path, scalars: Mapping[str, object]) -> Iterator[Logged]:
        bus = Bus()
        bus.add(LoggerHook(interval=1, writers=[writer()]))
        with Run(bus, model=nn.Linear(1, 1), work_dir=work_dir) as run:
            code = "bus.publish(AfterTrainIter(run=run, progress=progress, batch_idx=6, batch=None, outputs=scalars))"
            names = {"bus": bus, "AfterTrainIter": AfterTrainIter, "run": run, "progress": run.progress, "scalars": scalars}
            yield Logged(Statement(code, names), bus.drain)

    return prepared


LOGS = {SUBJECT: logs(JSONLinesWriter), f"{SUBJECT}, TensorBoard": logs(TensorBoardWriter)}
