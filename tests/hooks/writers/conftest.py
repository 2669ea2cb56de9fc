"""A run that logs to a writer, whichever it is, under the fixture ``logged``."""

from __future__ import annotations

import threading
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
    bus = Bus()
    bus.add(LoggerHook(interval=1, writers=writers))
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


def watched(cls: type[Writer]) -> type[Writer]:
    """A writer class that notes in ``calls`` which of its methods are called, by whom."""

    def noting(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.__dict__.setdefault("calls", []).append((name, threading.get_ident()))
            return getattr(cls, name)(self, *args, **kwargs)

        return method

    names = ("open", "write_scalars", "write_scalar", "write_image", "write_config", "write_text", "flush", "aborted", "close")
    defined = [name for name in names if getattr(cls, name) is not getattr(Writer, name)]
    return type(cls.__name__, (cls,), {name: noting(name) for name in defined})


@pytest.fixture
def logged() -> SimpleNamespace:
    return SimpleNamespace(loop=loop, watched=watched)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools send no word home."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
