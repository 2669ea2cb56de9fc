"""The loops of a run and their data, with the attributes of MMEngine's loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop


class Data:
    """Training or validation data other than a ``DataLoader``, with the ``dataset`` that hooks expect."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.dataset = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # its own error if it has none

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


def as_loader(data: Iterable[Any]) -> Any:
    """Return data that has a ``dataset``: itself if it is a ``DataLoader``."""
    return data if hasattr(data, "dataset") else Data(data)


class _Loop:
    """The common part of the loops. They only look like MMEngine's: the run drives itself."""

    _label = "loop"

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def run(self) -> None:
        self._runner.refuse(f"{self._label}.run()", "the run drives its own loop")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._runner.absent(f"{self._label}.{name}")


class _TrainLoop(_Loop):
    _label = "train_loop"

    @property
    def dataloader(self) -> Any:
        data = self._runner.run.data.train
        return self._runner.absent("train_dataloader") if data is None else as_loader(data)

    max_epochs, max_iters, epoch, iter = (
        property(attrgetter(f"_runner.{name}")) for name in ("max_epochs", "max_iters", "epoch", "iter")
    )

    @property
    def stop_training(self) -> Any:
        return self._runner.stops

    @stop_training.setter
    def stop_training(self, stops: bool) -> None:
        self._runner.ask_to_stop(stops=stops)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("val_interval", "val_begin", "max_epochs", "max_iters", "epoch", "iter", "dataloader"):
            self._runner.refuse(f"train_loop.{name} = {value!r}", "TrainLoop, or your own loop, decides that")
        super().__setattr__(name, value)


class EpochLoop(_TrainLoop, EpochBasedTrainLoop):  # type: ignore[misc]  # it has no types
    """An epoch-based training."""


class IterLoop(_TrainLoop, IterBasedTrainLoop):  # type: ignore[misc]
    """An iteration-based training."""


class EvaluationLoop(_Loop, BaseLoop):  # type: ignore[misc]
    """A validation or a test."""

    def __init__(self, runner: Any, label: str) -> None:
        super().__init__(runner)
        self._label = label

    @property
    def dataloader(self) -> Any:
        data = self._runner.run.data.evaluation
        return self._runner.absent(self._label.replace("loop", "dataloader")) if data is None else as_loader(data)
