"""MMEngine: Runner.call_hook, ExponentialMovingAverage, and the Runner with its default and its EMA hook."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from mmengine.hooks import CheckpointHook, Hook, LoggerHook, RuntimeInfoHook
from mmengine.logging import MessageHub, MMLogger
from mmengine.model import BaseModel, ExponentialMovingAverage
from mmengine.runner import LogProcessor, Runner
from mmengine.visualization import Visualizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.digits import LEARNING_RATE, MOMENTUM, Job
from benchmarks.peers import TITLES, Logged, Saver, Statement

CHECKPOINTS = "*.pth"
SCALARS = "**/vis_data/scalars.json"

# The names of runners are global in MMEngine, and each must be new.
_run_number = itertools.count()


class NoOp(Hook):
    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: object = None, outputs: object = None) -> None:
        pass


class HookRunner(Runner):
    """The hook list of a Runner without its model, data and log files."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    runner = HookRunner()
    for _ in range(handlers):
        runner.register_hook(NoOp())
    code = 'runner.call_hook("after_train_iter", batch_idx=0, data_batch=None, outputs=None)'
    return Statement(code, {**names, "runner": runner})


def ema(model: nn.Module, momentum: float) -> dict[str, Callable[[], None]]:
    average = ExponentialMovingAverage(model, momentum=momentum)
    return {TITLES["mmengine"]: lambda: average.update_parameters(model)}


class Classifier(BaseModel):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net = job.model

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "tensor"
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        if mode == "loss":
            return {"loss": Job.loss(self.net, (inputs, labels))}
        return self.net(inputs)


def train(job: Job, work_dir: Path) -> None:
    runner = Runner(
        model=Classifier(job),
        work_dir=str(work_dir),
        train_dataloader=job.loader(),
        train_cfg={"by_epoch": True, "max_epochs": job.epochs}
        if job.epochs > 1
        else {"by_epoch": False, "max_iters": job.iterations},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": LEARNING_RATE}},
        param_scheduler={"type": "CosineAnnealingLR", "by_epoch": False, "T_max": job.iterations},
        default_hooks={
            "logger": {"type": "LoggerHook", "interval": 1},
            "checkpoint": {
                "type": "CheckpointHook",
                "interval": job.checkpoint_interval,
                "by_epoch": False,
                "save_last": False,
            },
        },
        custom_hooks=[{"type": "EMAHook", "momentum": MOMENTUM}],
        # Scalars still go to scalars.json. This leaves out MMEngine's terminal lines, which the others do not write.
        log_level="ERROR",
        experiment_name=f"digits_{next(_run_number)}",
    )
    runner.train()


def weights(path: Path) -> Iterable[Tensor]:
    # With an average, "state_dict" holds it, and this the weights that were trained, after a counter.
    state = torch.load(path, weights_only=False)["ema_state_dict"]
    return [tensor for name, tensor in state.items() if name != "steps"]


class Holder(BaseModel):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self) -> None:
        """Do nothing; required by the base class, and never called."""


@contextmanager
def savers(model: nn.Module, work_dir: Path) -> Iterator[Saver]:
    """Save by its CheckpointHook on a Runner whose optimizer has no state, so that all contenders write as many bytes."""
    hook = CheckpointHook(interval=1)
    runner = Runner(
        model=Holder(model),
        work_dir=str(work_dir),
        train_dataloader=DataLoader([0]),
        train_cfg={"by_epoch": True, "max_epochs": 1_000_000},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.0}},
        param_scheduler=[],
        log_level="ERROR",
        experiment_name=f"saving_{next(_run_number)}",
    )
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    hook.before_train(runner)

    def save(path: Path) -> None:
        hook.out_dir, hook.filename_tmpl = str(path.parent), path.name
        hook.after_train_epoch(runner)

    yield Saver(save, lambda path: torch.load(path, weights_only=False)["state_dict"].values())


SAVERS = {"MMEngine CheckpointHook": savers}


@contextmanager
def logs(work_dir: Path, scalars: Mapping[str, object]) -> Iterator[Logged]:
    """Log as its default hooks do with the outputs of an iteration, with LocalVisBackend, on a runner without a model."""
    name = f"logging_{next(_run_number)}"
    runner = SimpleNamespace(
        iter=6,
        epoch=0,
        max_iters=10_000,
        max_epochs=1,
        train_dataloader=range(10_000),
        _train_loop=object(),
        work_dir=str(work_dir),
        timestamp="now",
        experiment_name=name,
        message_hub=MessageHub.get_instance(name),
        log_processor=LogProcessor(by_epoch=False),
        logger=MMLogger.get_instance(name, log_level="ERROR"),
        visualizer=Visualizer(name=name, vis_backends=[{"type": "LocalVisBackend"}], save_dir=str(work_dir)),
    )
    logger, info = LoggerHook(interval=1), RuntimeInfoHook()
    logger.before_run(runner)
    code = "info(runner, 6, None, scalars)\nlog(runner, 6, None, scalars)"
    names = {"info": info.after_train_iter, "log": logger.after_train_iter, "runner": runner, "scalars": scalars}
    yield Logged(Statement(code, names))


LOGS = {"MMEngine LoggerHook": logs}
