"""Call the methods of guests at MMEngine's moments, and keep their state during a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import mmengine
from mmengine.logging import MessageHub

from eventloop import TrainingError
from hooks.compat.mmengine import parts
from hooks.compat.mmengine.entry import ENTRY, entry_of, restore_hub, restore_schedulers

_UNKNOWN_DATA: Final = "the training data is unknown before the first epoch"
_REASONS: Final[Mapping[str, str]] = {
    "model": "the run has several models, but MMEngine's runner has one",
    "optim_wrapper": "the run has no optimizer",
    "max_epochs": "the run has no limit yet: it gets one from run.epochs()",
    "max_iters": f"{_UNKNOWN_DATA}, or its data has no length",
    "train_dataloader": _UNKNOWN_DATA,
    "val_dataloader": "the run has not validated yet",
    "test_dataloader": "the run has not tested yet",
}


class MissingAttributeError(AttributeError):
    """A guest uses an attribute of MMEngine's runner that a run lacks; ``hasattr`` is then False."""


class Adapter(Protocol):
    """The part of :class:`hooks.compat.mmengine.guest.MMEngineHook` that the runner uses."""

    guest: Any
    ran: bool
    heard: frozenset[str]

    def begin_run(self) -> None:
        """Call ``before_run`` of the guest, once in a run."""

    def call(self, stage: str, **arguments: Any) -> None:
        """Call a method of the guest, if it overrides it."""


class Moments:
    """The part of a :class:`~hooks.compat.mmengine.runner.GuestRunner` that its adapters call."""

    if TYPE_CHECKING:  # the runner defines these

        @property
        def by_iter(self) -> bool: ...
        @property
        def seed(self) -> int | None: ...
        @property
        def epoch(self) -> int: ...
        @property
        def iter(self) -> int: ...
        @property
        def max_epochs(self) -> int: ...
        @property
        def max_iters(self) -> int: ...
        @property
        def optim_wrapper(self) -> Any: ...

    def __init__(self) -> None:
        self.run: Any = None
        self.trains = False
        """True if the guests' ``before_train`` was called in the current run."""
        self.stops = False
        """True if a guest has stopped the training."""
        self._adapters: list[Adapter] = []
        self._calling: list[Any] = []
        self._epoch_open: list[Adapter] = []
        """The adapters whose guests have not had ``after_train_epoch`` of the present epoch."""
        self._entry: Mapping[str, Any] | None = None
        self._wrapper: tuple[list[int], Any] | None = None
        self.param_schedulers: Any = None
        self._named = False

    def enter(self, run: Any) -> None:
        """Begin a new run."""
        self.run = run
        self.trains = self.stops = False
        self._adapters, self._epoch_open, self._entry = [], [], None
        if self._wrapper is not None and self._wrapper[0] != [id(one) for one in run.optimizers.values()]:
            self._wrapper = self.param_schedulers = None
        if not self._named:
            self._named = True
            self.timestamp = parts.timestamp()
            self.experiment_name = parts.unused_name(f"{run.name}_{self.timestamp}")
            self.message_hub = MessageHub.get_instance(self.experiment_name)

    def add(self, adapter: Adapter) -> None:
        """Add the adapter of a guest; they come in the order of priorities."""
        self._adapters.append(adapter)

    def leads(self, adapter: Adapter) -> bool:
        """Return True for the first adapter, which does the work that is done once for all guests."""
        return self._adapters[0] is adapter

    def call(self, guest: Any, stage: str, **arguments: Any) -> None:
        """Call a method of a guest."""
        self._calling.append(guest)
        try:
            getattr(guest, stage)(self, **arguments)
        finally:
            self._calling.pop()

    def begin(self, *, trains: bool, now: bool = False) -> None:
        """Call ``before_run`` of all guests, and ``before_train`` in a training: once the data is known, or ``now``."""
        trains = trains and not self.trains and (now or self.run.train_data is not None)
        if self.trains or not (trains or now or not self.run.training):
            return
        if trains:
            self._make_schedulers()
        for adapter in self._adapters:
            adapter.begin_run()
        if trains:
            self.trains = True
            for adapter in self._adapters:
                adapter.call("before_train")

    def begin_epoch(self) -> None:
        """Begin an epoch; end the run instead if a guest has stopped it."""
        if self.stops:
            self.stop_if_asked()
            return
        self.begin(trains=True, now=True)
        self._epoch_open = list(self._adapters)

    def end_epoch(self, by: Adapter | None) -> None:
        """Call ``after_train_epoch`` of one guest, or of all if an iteration-based training was stopped."""
        due = [by] if by is not None else self._epoch_open if self.by_iter else []
        self._epoch_open = [adapter for adapter in self._epoch_open if adapter not in due]
        for adapter in due:
            adapter.call("after_train_epoch")
        if by is not None and self.run.validates is False:
            self.stop_if_asked()

    def ask_to_stop(self, *, stops: bool) -> None:
        """Stop as MMEngine does: after the iteration in iteration-based training, else after the epoch and its validation."""
        self.stops = stops
        if self.by_iter and self.run.progress.stage == "train":
            self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Stop the run if a guest asked for it."""
        if self.stops and self.run.training:
            self.run.stop("a hook of MMEngine set runner.train_loop.stop_training")

    def batch_index(self, index: int) -> int:
        """Return the index that MMEngine gives: within the epoch, or in iteration-based training of all iterations."""
        return self.iter if self.by_iter else index

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the guests' state from a checkpoint, also from a converted one of MMEngine."""
        self._entry = checkpoint.get(ENTRY, {})
        restore_hub(self.message_hub, self._entry or {})

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the guests' state to a checkpoint."""
        checkpoint[ENTRY] = entry_of(self.message_hub, self.param_schedulers, self._wrappers())

    def meta(self) -> dict[str, Any]:
        """Return the facts that MMEngine's checkpoints have under ``"meta"``, for hooks that read them or add to them."""
        facts = {"epoch": self.epoch, "iter": self.iter, "seed": self.seed, "experiment_name": self.experiment_name}
        return {**facts, "time": time.strftime("%Y%m%d_%H%M%S"), "mmengine_version": mmengine.__version__}

    def absent(self, name: str) -> NoReturn:
        """Raise the error for a missing attribute."""
        if name in ("work_dir", "log_dir", "logger", "visualizer"):
            reason = self.run.work_dir_advice
        else:
            reason = _REASONS.get(name, "a trainbus run does not have this attribute")
        raise MissingAttributeError(f"{self._caller} uses runner.{name}: {reason}", name=name, obj=self)

    def refuse(self, action: str, reason: str) -> NoReturn:
        """Raise the error for an action without an effect on the run."""
        raise TrainingError(f"{self._caller} uses runner.{action}: {reason}")

    @property
    def _caller(self) -> str:
        return f"MMEngine's hook {type(self._calling[-1]).__name__}" if self._calling else "a hook of MMEngine"

    def _wrappers(self) -> dict[str, Any]:
        return parts.by_name(self.run.optimizers, self.optim_wrapper) if self.run.optimizers else {}

    def _make_schedulers(self) -> None:
        """Make the schedulers of the configuration. In a resumed run the loaded rates stay."""
        described = self.run.config.get("param_scheduler")
        if described is None or not self.run.optimizers:
            return
        groups = [group for one in self._wrappers().values() for group in one.param_groups]
        before = [{name: group[name] for name in group if name != "params"} for group in groups]
        if self.param_schedulers is None:
            self.param_schedulers = parts.param_schedulers(
                described,
                self.optim_wrapper,
                epoch_length=self.run.epoch_length,
                max_epochs=self.max_epochs,
                max_iters=self.max_iters,
            )
        if self._entry is not None:
            restore_schedulers(self.param_schedulers, self._wrappers(), self._entry)
            for group, values in zip(groups, before, strict=True):
                group.update(values)
