"""A run that logs to a writer, whichever it is, under the fixture ``logged``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eventloop import Bus, TrainLoop
from hooks import LoggerHook, Writer


class Score:
    def __init__(self) -> None:
        self.value = 0.5

    def update(self) -> None: ...

    def compute(self) -> float:
        self.value += 0.25
        return self.value

    def reset(self) -> None: ...


def loop(*writers: Writer, **options: Any) -> TrainLoop:
    """Two epochs of three iterations; the loss is 1 in the first iteration, 2 in the second and so on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    bus = Bus(LoggerHook(interval=1, writers=writers))
    every = options.pop("every", None)
    if every is not None:
        bus.on("after_train_iter", every)
    bus.on("after_train_iter", lambda event: event.run.report(loss=event.progress.iter + 1.0))
    return TrainLoop(
        model,
        **{
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "step": lambda model, batch: model(batch).mean(),
            "train_data": [torch.ones(1, 1)] * 3,
            "val_data": [torch.ones(1, 1)],
            "val_step": lambda model, batch: {},
            "metrics": {"accuracy": Score()},
            "max_epochs": 2,
            "bus": bus,
        }
        | options,
    )


@pytest.fixture
def logged() -> SimpleNamespace:
    return SimpleNamespace(loop=loop)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools send no word home."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
