"""``RuntimeInfoHook``: keep the facts of a run in ``run.info``, for code without access to the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trainbus.eventloop import Hook, Priority, events, mount
from trainbus.eventloop.plain import plain_config
from trainbus.eventloop.registry import register

_NUMBERS = (int, float, np.generic)


@register
class RuntimeInfoHook(Hook):
    """Keep ``run.info`` up to date, and report learning rates so that loggers write them.

    ===================  =================================================================================
    from                 in ``run.info``
    ===================  =================================================================================
    before_run           ``experiment``, ``seed``, ``config``
    before_train         ``epoch``, ``iter``, ``max_epochs``, ``max_iters``, ``stage``
    before_train_iter    ``iter``, ``train/lr`` and its relatives (below)
    after_train_iter     ``train/<name>`` for every scalar reported so far; tensors stay on their device
    after_val_epoch      ``val/<name>`` for every metric; the same with ``test``
    ===================  =================================================================================

    The learning rate is ``lr``, or ``<optimizer>/lr`` if there are several optimizers. A further parameter group with another
    rate is ``lr/group1`` and so on, or ``lr/<name>`` if the group has a ``"name"``.

    The hook never waits for a device; ``.item()`` on an entry of ``run.info`` does.
    """

    priority = Priority.VERY_HIGH
    observes = True

    def __init__(self) -> None:
        self._optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self._own_rate: set[str] = set()
        self._stage_before: Any = None

    @mount("before_run", "before_train")  # again, because a resume has restored the facts of the run that saved
    def identify(self, event: events.BeforeRun | events.BeforeTrain) -> None:
        event.run.info.update(experiment=event.run.name, seed=event.run.seed, config=plain_config(event.run.config))

    def before_train(self, event: events.BeforeTrain) -> None:
        run, progress = event.run, event.progress
        limits = {"max_epochs": progress.max_epochs, "max_iters": progress.max_iters}
        run.info.update(limits, epoch=progress.epoch, iter=progress.iter, stage="train")
        alone = len(run.optimizers) == 1
        self._optimizers = [("lr" if alone else f"{name}/lr", optimizer) for name, optimizer in run.optimizers.items()]
        self._own_rate = set()

    def before_train_epoch(self, event: events.BeforeTrainEpoch) -> None:
        event.run.info.update(epoch=event.progress.epoch, stage="train")

    def before_train_iter(self, event: events.BeforeTrainIter) -> None:
        run, info = event.run, event.run.info
        info["iter"] = event.progress.iter
        for name, optimizer in self._optimizers:
            groups = optimizer.param_groups
            rates: dict[str, Any] = {name: groups[0].get("lr")}
            if len(groups) > 1:
                rates.update(self._further_rates(name, groups))
            run.report(**rates)
            for key, rate in rates.items():
                info[f"train/{key}"] = rate

    def after_train_iter(self, event: events.AfterTrainIter) -> None:
        info = event.run.info
        for name, value in event.outputs.items():
            # The exact type first: isinstance(..., torch.Tensor) runs Python code for other types.
            if type(value) is torch.Tensor or (type(value) is not float and isinstance(value, torch.Tensor)):
                if value.numel() == 1:
                    info[f"train/{name}"] = value.detach() if value.requires_grad else value
            elif isinstance(value, _NUMBERS):
                info[f"train/{name}"] = value

    @mount("before_val", "before_test")
    def evaluation_begins(self, event: events.BeforeVal | events.BeforeTest) -> None:
        self._stage_before = event.run.info.get("stage")
        event.run.info["stage"] = event.progress.stage

    @mount("after_val_epoch", "after_test_epoch")
    def take_metrics(self, event: events.AfterValEpoch | events.AfterTestEpoch) -> None:
        for name, value in event.metrics.items():
            event.run.info[f"{event.progress.stage}/{name}"] = value.detach() if isinstance(value, torch.Tensor) else value

    @mount("after_val", "after_test")
    def evaluation_ends(self, event: events.AfterVal | events.AfterTest) -> None:
        event.run.info["stage"] = self._stage_before

    def _further_rates(self, name: str, groups: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the rate of each group that differs from the first group's now or did so before."""
        first = groups[0].get("lr")
        for index, group in enumerate(groups[1:], 1):
            rate = group.get("lr")
            label = f"{name}/{group.get('name') or f'group{index}'}"
            # Only floats are compared: comparing tensors would wait for the device.
            if rate is not first and (type(rate) is not float or rate != first):
                self._own_rate.add(label)
            if label in self._own_rate:
                yield label, rate
