"""One module per contender: what a user of that library would write for the jobs of the benchmarks.

A module may define any of

- ``dispatch(names, handlers) -> Statement``: announce "after train iter" to that many no-op handlers;
- ``ema(model) -> {name: update}``: functions that update an average of the model once;
- ``offload() -> {name: hand_off}``: ways to hand an event to a consumer elsewhere, each a context manager over ``receive``;
- ``LOGS = {name: logs}``: ways to log the scalars of an iteration (see ``Logs``);
- ``SAVERS = {name: savers}``: ways to save the weights of a model (see ``Savers``);
- ``PROFILERS = {name: profiled}``: the job of ``train`` under a profiler (see ``Profiled``);
- ``train(job, work_dir)`` with ``CHECKPOINTS`` and ``SCALARS`` (patterns of the files it writes): the digits job; and
  ``weights(path)``: the trained weights of the model in such a checkpoint, in the order of its parameters.

Modules import their library at the top; a peer that is not installed is left out with its name. ``trainbus``, ``handwritten``
and ``stdlib`` need nothing but what trainbus needs.
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
    "distributed": "torch.distributed.checkpoint",
}


@dataclass(frozen=True)
class Statement:
    """Source to be timed, and the globals it runs with, as in a training script."""

    code: str
    names: Mapping[str, object]
    scope: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Entered before the statement is timed and left when the benchmark is over."""


class Stamped(msgspec.Struct, frozen=True):
    """The event of those that have no events of their own: when it was published, by ``perf_counter_ns``."""

    at: int


Receive = Callable[[Any], None]
"""Notes that something arrived; takes anything with ``at``."""


@dataclass(frozen=True)
class HandOff:
    """One way to hand over, ready to be used."""

    publish: Callable[[Any], object]
    make: Callable[[int], Any] = Stamped
    """Make the published object; not timed."""
    delivers: bool = True
    """False if the contestant has no consumer, or has it in another process."""


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
    """One way to save the weights of a model, ready to be used again and again."""

    save: Callable[[Path], object]
    """Under a name that nothing has yet; when it returns, training may change the weights."""
    read: Callable[[Path], Iterable[Tensor]]
    """The weights in what was saved there, in the order of the model's state dict."""
    settle: Callable[[], object] = lambda: None
    """Waits until the last save is complete; the disk need not have it yet."""
    background: bool = False
    """Whether something is left to be written when ``save`` returns."""


Savers = Callable[[nn.Module, Path], AbstractContextManager[Saver]]
"""Gets ready to save this model again and again, with a directory for what else it writes."""


Report = Callable[[], str]
"""Makes the report of a profiler whose training is over."""

BY_NAME, IN_THE_REST, ALL_HANDLERS = "by name", "in the rest", "in a sum of handlers"


@dataclass(frozen=True)
class Told:
    """Where a profiler's report has the time of logging and of checkpoints."""

    logging: str
    checkpoints: str
    shows: tuple[str, ...] = ()
    """Words that the report must have for this to be true."""
    hides: tuple[str, ...] = ()
    """Words that it must not have."""

    def check(self, name: str, report: str) -> None:
        """Raise RuntimeError if the report is another one."""
        wrong = [word for word in self.shows if word not in report] + [word for word in self.hides if word in report]
        if wrong:
            raise RuntimeError(f"the report of {name} is not what the benchmark says of it: {', '.join(wrong)}\n{report}")


@dataclass(frozen=True)
class Profiled:
    """The digits job under a profiler."""

    train: Callable[[Any, Path], Report]
    """Takes the job and the work dir."""
    told: Told


def load(names: tuple[str, ...]) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """Import the named peers: the modules by title, and the reasons of those that are left out."""
    modules, left_out = {}, {}
    for name in names:
        try:
            modules[TITLES[name]] = importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            left_out[TITLES[name]] = str(error)
    return modules, left_out


def no_op_handlers(count: int) -> list[Callable[[object], None]]:
    """Distinct functions of one argument that do nothing."""

    def make() -> Callable[[object], None]:
        def handler(event: object) -> None:
            pass

        return handler

    return [make() for _ in range(count)]
