"""One module per contender, with the code that a user of that library would write for the jobs of the benchmarks.

A module may define any of

- ``dispatch(names, handlers) -> Statement``: announce "after train iter" to that many no-op handlers;
- ``ema(model) -> {name: update}``: functions that update an average of the model once;
- ``offload() -> {name: hand_off}``: ways to hand an event to a consumer elsewhere, each a context manager over ``receive``;
- ``LOGS = {name: logs}``: ways to log the scalars of an iteration (see ``Logs``);
- ``SAVERS = {name: savers}``: ways to save the weights of a model (see ``Savers``);
- ``STORES = {name: savers}``: the same with the URL of an S3 store for the path;
- ``RESUMES = {name: resume}``: ways to save a model and its optimizer, and to give others that state (see ``Resume``);
- ``PROFILERS = {name: profiled}``: the job of ``train`` under a profiler (see ``Profiled``);
- ``train(job, work_dir)`` with ``CHECKPOINTS`` and ``SCALARS`` (patterns of the files it writes): the digits job; and
  ``weights(path)``: the trained weights of the model in such a checkpoint, in the order of its parameters.

Modules import their library at the top. A peer that is not installed is reported and left out. ``trainbus``, ``handwritten``
and ``stdlib`` need only trainbus's dependencies.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer

TITLES = {
    "mmengine": "MMEngine",
    "mlflow": "MLflow",
    "tensorboard": "TensorBoard",
    "ignite": "Ignite",
    "traceml": "TraceML",
    "lightning": "Lightning",
    "pluggy": "pluggy",
    "pyee": "pyee",
    "psygnal": "psygnal",
    "blinker": "blinker",
    "averaged_model": "AveragedModel",
    "anyio": "anyio",
    "bubus": "bubus",
    "safetensors": "safetensors",
    "boto3": "boto3",
    "s3fs": "s3fs",
    "obstore": "obstore",
    "s3torchconnector": "s3torchconnector",
    "distributed": "torch.distributed.checkpoint",
}


@dataclass(frozen=True)
class Statement:
    """Source to time, and its globals, as in a training script."""

    code: str
    names: Mapping[str, object]
    scope: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Entered before the statement is timed and left when the benchmark is over."""


class Stamped(msgspec.Struct, frozen=True):
    """The event for contenders without an event class: the time of its publish, by ``perf_counter_ns``."""

    at: int


Receive = Callable[[Any], None]
"""Notes an arrival; takes any object with ``at``."""


@dataclass(frozen=True)
class HandOff:
    """One way to hand events over, ready to use."""

    publish: Callable[[Any], object]
    make: Callable[[int], Any] = Stamped
    """Make the published object; not timed."""
    delivers: bool = True
    """False if the contender has no consumer, or has it in another process."""


HandOffs = Callable[[Receive], AbstractContextManager[HandOff]]


@dataclass(frozen=True)
class Logged:
    """A statement that logs the scalars of one iteration."""

    statement: Statement
    settle: Callable[[], object] = lambda: None
    """Waits until everything is written; not timed."""


Logs = Callable[[Path, Mapping[str, object]], AbstractContextManager[Logged]]
"""Gets ready to log these scalars into a directory."""


@dataclass(frozen=True)
class Saver:
    """One way to save the weights of a model, ready for repeated use."""

    save: Callable[[Any], object]
    """Save under an unused name; after the return, training may change the weights."""
    read: Callable[[Any], Iterable[Tensor]]
    """Load the weights saved there, in the order of the model's state dict."""
    settle: Callable[[], object] = lambda: None
    """Wait until the last save is complete; it need not be on the disk yet."""
    background: bool = False
    """Whether ``save`` returns before the file is written."""


Savers = Callable[[nn.Module, Any], AbstractContextManager[Saver]]
"""Prepares repeated saves of this model, with a directory or the URL of a store for further files."""


Trained = tuple[nn.Module, Optimizer]


@dataclass(frozen=True)
class Resume:
    """One way to save a model and its optimizer, and to restore the state of others from that."""

    save: Callable[[Trained, Path], object]
    resume: Callable[[Trained, Path], object]


Report = Callable[[], str]
"""Makes the report of a profiler whose training is over."""

BY_NAME, IN_THE_REST, ALL_HANDLERS = "by name", "in the rest", "in a sum of handlers"


@dataclass(frozen=True)
class Told:
    """The part of a profiler's report that has the time of logging and of checkpoints."""

    logging: str
    checkpoints: str
    shows: tuple[str, ...] = ()
    """Words that the report must contain for this to be true."""
    hides: tuple[str, ...] = ()
    """Words that it must not contain."""

    def check(self, name: str, report: str) -> None:
        """Raise RuntimeError if the report has other words."""
        wrong = [word for word in self.shows if word not in report] + [word for word in self.hides if word in report]
        if wrong:
            raise RuntimeError(f"the report of {name} does not match the benchmark's description: {', '.join(wrong)}\n{report}")


@dataclass(frozen=True)
class Profiled:
    """The digits job under a profiler."""

    train: Callable[[Any, Path], Report]
    """Takes the job and the work dir."""
    told: Told


def load(names: tuple[str, ...]) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """Import the named peers; return the modules by title, and the reasons for those left out."""
    modules, left_out = {}, {}
    for name in names:
        try:
            modules[TITLES[name]] = importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            left_out[TITLES[name]] = str(error)
    return modules, left_out


def no_op_handlers(count: int) -> list[Callable[[object], None]]:
    """Return distinct no-op functions of one argument."""

    def make() -> Callable[[object], None]:
        def handler(event: object) -> None:
            pass

        return handler

    return [make() for _ in range(count)]
