"""``RuntimeInfoHook``: the facts of a run in ``run.info``, for everyone who has no access to the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from eventloop import Hook, Priority, register
from eventloop.events import (
    AfterTestEpoch,
    AfterTrainIter,
    AfterValEpoch,
    BeforeRun,
    BeforeTest,
    BeforeTrain,
    BeforeTrainEpoch,
    BeforeTrainIter,
    BeforeVal,
    RunEvent,
    RunView,
)


@register
class RuntimeInfoHook(Hook):
    """Keeps ``run.info`` up to date, and reports learning rates so that loggers see them.

    ===================  =================================================================================
    from                 in ``run.info``
    ===================  =================================================================================
    before_run           ``experiment``, ``seed``, ``config``
    before_train         ``epoch``, ``iter``, ``max_epochs``, ``max_iters``, ``stage``
    before_train_iter    ``iter``, ``train/lr`` and its relatives (below)
    after_train_iter     ``train/<name>`` for every scalar reported so far; tensors stay on their device
    after_val_epoch      ``val/<name>`` for every metric; the same with ``test``
    ===================  =================================================================================

    Learning rates are reported as ``lr``, with several optimizers as ``<optimizer>/lr``. Where a further parameter group
    has a rate of its own, it is ``lr/group1`` and so on, or ``lr/<name>`` if the group has a ``"name"``.

    Nothing here waits for a device: who needs a number calls ``.item()`` on the entry, at that moment's cost.
    """

    priority = Priority.VERY_HIGH
    observes = True

    def __init__(self) -> None:
        self._optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self._own_rate: set[str] = set()
        self._keys: dict[str, str] = {}
        self._stage_before: Any = None

    def before_run(self, event: BeforeRun) -> None:
        """Note who runs."""
        self._identify(event.run)

    def before_train(self, event: BeforeTrain) -> None:
        """Note how far training has come and is to go."""
        run, progress = event.run, event.progress
        self._identify(run)  # again: a resume brought back the facts of the run that saved
        run.info["max_epochs"] = progress.max_epochs
        run.info["max_iters"] = progress.max_iters
        run.info["epoch"] = progress.epoch
        run.info["iter"] = progress.iter
        run.info["stage"] = "train"
        alone = len(run.optimizers) == 1
        self._optimizers = [("lr" if alone else f"{name}/lr", optimizer) for name, optimizer in run.optimizers.items()]
        self._own_rate = set()

    def before_train_epoch(self, event: BeforeTrainEpoch) -> None:
        """Note the epoch."""
        event.run.info["epoch"] = event.progress.epoch
        event.run.info["stage"] = "train"

    def before_train_iter(self, event: BeforeTrainIter) -> None:
        """Note the iteration and the learning rates it uses."""
        run = event.run
        info = run.info
        info["iter"] = event.progress.iter
        for name, optimizer in self._optimizers:
            groups = optimizer.param_groups
            rates: dict[str, Any] = {name: groups[0].get("lr")}
            if len(groups) > 1:
                rates.update(self._further_rates(name, groups))
            run.report(**rates)
            for key, rate in rates.items():
                info[self._keys.get(key) or self._key(key)] = rate

    def after_train_iter(self, event: AfterTrainIter) -> None:
        """Note every scalar that was reported, as it is."""
        info = event.run.info
        keys = self._keys
        for name, value in event.outputs.items():
            # By exact type: isinstance with torch.Tensor runs Python code in its metaclass.
            kind = _KINDS.get(type(value))
            if kind is None:
                kind = _learn_kind(value)
            if kind is _NUMBER:
                info[keys.get(name) or self._key(name)] = value
            elif kind is _TENSOR and value.numel() == 1:
                info[keys.get(name) or self._key(name)] = value.detach() if value.requires_grad else value

    def before_val(self, event: BeforeVal) -> None:
        """Note the stage."""
        self._enter(event, "val")

    def after_val_epoch(self, event: AfterValEpoch) -> None:
        """Note the metrics, scalar or not."""
        event.run.info.update({f"val/{name}": _detached(value) for name, value in event.metrics.items()})

    def after_val(self, event: RunEvent) -> None:
        """Go back to the stage before."""
        event.run.info["stage"] = self._stage_before

    def before_test(self, event: BeforeTest) -> None:
        """Note the stage."""
        self._enter(event, "test")

    def after_test_epoch(self, event: AfterTestEpoch) -> None:
        """Note the metrics, scalar or not."""
        event.run.info.update({f"test/{name}": _detached(value) for name, value in event.metrics.items()})

    def after_test(self, event: RunEvent) -> None:
        """Go back to the stage before."""
        event.run.info["stage"] = self._stage_before

    def _identify(self, run: RunView) -> None:
        run.info["experiment"] = run.name
        run.info["seed"] = run.seed
        run.info["config"] = dict(run.config)

    def _enter(self, event: RunEvent, stage: str) -> None:
        self._stage_before = event.run.info.get("stage")
        event.run.info["stage"] = stage

    def _further_rates(self, name: str, groups: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the rates of groups that do not share the first one's; once apart, they are told every time."""
        first = groups[0].get("lr")
        for index, group in enumerate(groups[1:], 1):
            rate = group.get("lr")
            label = f"{name}/{group.get('name') or f'group{index}'}"
            if label in self._own_rate:
                yield label, rate
            # A rate that is a tensor lives on a device, and comparing two of them would wait for it.
            elif rate is not first and (type(rate) is not float or rate != first):
                self._own_rate.add(label)
                yield label, rate

    def _key(self, name: str) -> str:
        return self._keys.setdefault(name, f"train/{name}")


_NUMBER, _TENSOR, _OTHER = "number", "tensor", "other"
_KINDS: dict[type, str] = {int: _NUMBER, float: _NUMBER, torch.Tensor: _TENSOR}


def _learn_kind(value: Any) -> str:
    number = isinstance(value, int | float | np.generic)
    kind = _TENSOR if isinstance(value, torch.Tensor) else _NUMBER if number else _OTHER
    return _KINDS.setdefault(type(value), kind)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
