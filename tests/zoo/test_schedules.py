"""Every schedule that torch has, found by walking ``torch.optim``, stepped by iteration, by epoch and by a metric."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from .jobs import HOMES, job
from .kit import LOOP, OWN, tried
from .trainers import TRAINERS


def _kinds() -> list[type[Any]]:
    names = [module.name for module in pkgutil.iter_modules(torch.optim.__path__) if not module.name.startswith("_")]
    modules = [importlib.import_module(f"torch.optim.{name}") for name in names]
    found = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)}
    base = lr_scheduler.LRScheduler
    return sorted(
        {kind for kind in found if issubclass(kind, base) and kind.__name__ not in ("LRScheduler", "_LRScheduler")},
        key=lambda kind: kind.__name__,
    )


KINDS = _kinds()
WAYS = {way.name: way for way in (OWN, LOOP, *TRAINERS)}


class Decay:
    """A function with a state, which torch saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.95**step + self.calls / 1000


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "T_0": lambda _: 3,
    "T_max": lambda _: 5,
    "base_lr": lambda _: 0.01,
    "gamma": lambda _: 0.9,
    "lr_lambda": lambda _: Decay(),
    "max_lr": lambda _: 0.2,
    "milestones": lambda _: [3],
    "schedulers": lambda optimizer: [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
    "step_size": lambda _: 2,
    "swa_lr": lambda _: 0.05,
}
"""Values of arguments that a schedule needs; a new one in the next torch fails here by its name."""
MORE: dict[str, dict[str, Any]] = {"OneCycleLR": {"total_steps": 20}, "ReduceLROnPlateau": {"patience": 0}}


def schedule_of(kind: type[Any], optimizer: torch.optim.Optimizer) -> Any:
    needed = [
        name
        for name, each in inspect.signature(kind).parameters.items()
        if each.default is inspect.Parameter.empty and name != "optimizer"
    ]
    return kind(optimizer=optimizer, **{name: ARGUMENTS[name](optimizer) for name in needed}, **MORE.get(kind.__name__, {}))


@pytest.mark.parametrize("by", ["iter", "epoch"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:The epoch parameter in")
def test_each_schedule_resumes_in_each_loop_and_trainer(kind, way, by, tmp_path, row):
    if kind is lr_scheduler.ReduceLROnPlateau:
        if way not in ("own loop", "`TrainLoop`"):
            pytest.skip("it needs a metric of a validation")
        by = "metric"
    plain = job(HOMES[0], lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def make():
        parts = plain()
        parts.schedule, parts.by = schedule_of(kind, parts.optimizer), by
        return parts

    row("schedules of torch", kind.__name__, f"by {by}", way, tried(WAYS[way], make, tmp_path))
