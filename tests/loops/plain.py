"""What a training program calls of trainbus, without trainbus: plain loops, and averages and schedules where a loop has them.

A program that gets this module in place of ``trainbus`` is the same program without its lines.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch

from trainbus.hooks.averages import ExponentialMovingAverage


class Bus:
    def __init__(self, *hooks: Any) -> None:
        self.hooks = [hook for hook in hooks if hook is not None]

    def on(self, event: str, handler: Any) -> None: ...


def _nothing(*arguments: Any, **options: Any) -> None: ...


CheckpointHook = PreemptionHook = LoggerHook = JSONLinesWriter = _nothing


class EMAHook:
    """Average the weights after each step of their optimizer (its code behind it included); validate with the average."""

    def __init__(self, ema_type: str, *, momentum: float, model: str | None = None) -> None:
        self.momentum, self.name = momentum, model
        self.average: ExponentialMovingAverage | None = None

    def stepped(self, run: Run, optimizers: Collection[str]) -> None:
        own = {id(parameter) for parameter in self._model(run).parameters()}
        if any(id(run.optimizers[name].param_groups[0]["params"][0]) in own for name in optimizers):
            self.average = self.average or ExponentialMovingAverage(self._model(run), momentum=self.momentum)
            self.average.update_parameters(self._model(run))

    steps_again = stepped

    def passed(self, run: Run) -> None: ...

    def swap(self, run: Run) -> None:
        if self.average is not None:
            self.average.swap(self._model(run))

    def restore(self, run: Run) -> None:
        if self.average is not None:
            self.average.restore(self._model(run))

    def _model(self, run: Run) -> torch.nn.Module:
        return run.models[self.name or "model"]


class ParamSchedulerHook:
    """Step a schedule after each body in which its optimizer has stepped, or after each pass of training."""

    def __init__(self, scheduler: Any, *, by: str) -> None:
        self.scheduler, self.by = scheduler, by

    def passed(self, run: Run) -> None:
        if self.by == "epoch":
            self.scheduler.step()

    def steps_again(self, run: Run, optimizers: Collection[str]) -> None: ...

    def stepped(self, run: Run, optimizers: Collection[str]) -> None:
        if self.by == "iter" and any(run.optimizers[name] is self.scheduler.optimizer for name in optimizers):
            self.scheduler.step()

    def swap(self, run: Run) -> None: ...

    restore = swap


class Run:
    """Iterate, and write down what is reported. ``lines`` has the entries of each body, and the means of each validation."""

    def __init__(
        self, bus: Bus, *, model: Any, optimizer: Any, work_dir: Any, stateful: Mapping[str, Any], resume: str | None = None
    ) -> None:
        self.bus = bus
        self.models = model if isinstance(model, dict) else {"model": model}
        self.optimizers = optimizer if isinstance(optimizer, dict) else {"optimizer": optimizer}
        self.progress = SimpleNamespace(epoch=0, iter=0, update=0, batch_idx=0)
        self.lines: list[tuple[str, dict[str, float]]] = []
        self.checkpoints = SimpleNamespace(save=lambda: None, best=None)
        self._max_iters: int | None = None
        self._outputs: dict[str, Any] = {}
        self._stepped = Counter[str]()
        self._in_body = False
        self._pass: Callable[[], Generator[Any] | None] = lambda: None
        self._left = False
        for name, one in self.optimizers.items():
            one.register_step_pre_hook(partial(self._begin_step, name))
            one.register_step_post_hook(lambda *step, name=name: self._stepped.update([name]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_left()

    def _begin_step(self, name: str, *step: Any) -> None:
        if self._left:
            self._end_body()
        for hook in self.bus.hooks if self._stepped[name] else ():
            hook.steps_again(self, [name])

    @property
    def _complete(self) -> bool:
        return self._max_iters is not None and self.progress.iter >= self._max_iters

    def epochs(self, max_epochs: int | None = None, *, max_iters: int | None = None) -> Iterator[int]:
        at, self._max_iters = self.progress, max_iters
        while at.iter < max_iters if max_iters is not None else at.epoch < max_epochs:
            before = at.iter
            yield at.epoch
            if (kept := self._pass()) is not None:  # by a variable
                kept.close()
            self._end_left()
            if at.iter == before:
                raise RuntimeError("an epoch without a batch would be repeated forever")
            at.epoch += 1

    def train(self, loader: Iterable[Any], *, endless: bool = False, accumulate: int = 1) -> Batches:
        batches = self._batches(loader, endless=endless)
        self._pass = weakref.ref(batches)
        return Batches(batches)

    def _batches(self, loader: Iterable[Any], *, endless: bool) -> Generator[Any]:
        at = self.progress
        self._end_left()
        if self._complete:
            return
        at.batch_idx = 0
        try:
            while True:
                for batch in loader:
                    self._begin_body()
                    self._dropped = True
                    yield batch
                    self._dropped = False
                    self._end_body()
                    if self._complete:
                        return
                if not endless:
                    return
        except GeneratorExit:  # by `break`: the next call of the run ends the pass, as the page "Your own loop" says
            self._left = True
            raise
        finally:
            if not self._left:
                self._end_pass()

    def _end_left(self) -> None:
        """End a pass whose `for` statement was left."""
        if self._left:
            self._left = False
            self._end_pass()

    def _end_pass(self) -> None:
        self._end_body()
        for hook in self.bus.hooks:
            hook.passed(self)

    def validate(self, loader: Iterable[Any]) -> Validation:
        return Validation(self, loader)

    def test(self, loader: Iterable[Any]) -> Validation:
        return Validation(self, loader, "test")

    def report(self, **entries: Any) -> None:
        self._outputs.update(entries)

    def keep(self, **values: Any) -> SimpleNamespace:
        return SimpleNamespace(**values)

    def drive(self) -> Drive:
        return Drive(self)

    def _begin_body(self) -> None:
        self._in_body, self._outputs, self._dropped = True, {}, False
        self._stepped.clear()

    def _end_body(self) -> None:
        """End the body of a batch: it counts, but for one that was left without a step."""
        if not self._in_body:
            return
        self._in_body = False
        at = self.progress
        at.iter, at.batch_idx = at.iter + 1, at.batch_idx + 1
        if self._dropped and not self._stepped.total():
            return
        at.update += max(self._stepped.values(), default=0)
        for hook in self.bus.hooks:
            hook.stepped(self, +self._stepped)
        self.lines.append(("train", {name: float(torch.as_tensor(value).detach()) for name, value in self._outputs.items()}))


class Batches:
    """Batches for a ``for`` statement, or for a block."""

    start = 0

    def __init__(self, batches: Generator[Any]) -> None:
        self._pass = batches
        self._batches: Iterator[Any] = batches

    def __iter__(self) -> Iterator[Any]:
        batches, self._batches = self._batches, iter(())
        return batches

    def __enter__(self) -> Iterator[Any]:
        return iter(self)

    def __exit__(self, *error: object) -> None:
        self._pass.close()


class Drive:
    """The calls of ``run.drive()``."""

    validation_comes_first = False

    def __init__(self, run: Run) -> None:
        self._run = run

    def begin_train(self, *, max_epochs: int) -> None: ...

    def begin_epoch(self, loader: Iterable[Any]) -> Iterable[Any]:
        return loader

    def begin_iteration(self, batch: Any) -> None:
        self._run._begin_body()

    def end_iteration(self) -> None:
        self._run._end_body()

    def should_stop(self) -> bool:
        return False

    def end_epoch(self) -> None:
        for hook in self._run.bus.hooks:
            hook.passed(self._run)
        at = self._run.progress
        at.epoch, at.batch_idx = at.epoch + 1, 0

    def end_train(self) -> None: ...


class Validation:
    def __init__(self, run: Run, loader: Iterable[Any], stage: str = "val") -> None:
        self._run, self._loader, self._stage = run, loader, stage
        self.metrics: dict[str, float] = {}

    def __iter__(self) -> Iterator[Any]:
        self._run._end_left()
        run, outputs, sums = self._run, self._run._outputs, dict[str, list[float]]()
        modes = [(module, module.training) for model in run.models.values() for module in model.modules()]
        for model in run.models.values():
            model.eval()
        for hook in run.bus.hooks:
            hook.swap(run)
        try:
            with torch.no_grad():
                for batch in self._loader:
                    run._outputs = {}
                    yield batch
                    for name, value in run._outputs.items():
                        sums.setdefault(name, []).append(float(value))
        finally:
            run._outputs = outputs
            for hook in run.bus.hooks:
                hook.restore(run)
            for module, mode in modes:
                module.training = mode
        self.metrics = {name: sum(values) / len(values) for name, values in sums.items()}
        run.lines.append((self._stage, self.metrics))
