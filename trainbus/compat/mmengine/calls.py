"""``GuestCalls``: call the methods of guests at MMEngine's moments, and keep their state during a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

import mmengine
from mmengine.logging import MessageHub

from trainbus.compat.mmengine import parts
from trainbus.compat.mmengine.entry import ENTRY, entry_of, restore_hub, restore_schedulers
from trainbus.compat.mmengine.runner import GuestRunner
from trainbus.eventloop.events import Slot


class Adapter(Protocol):
    """The part of :class:`trainbus.compat.mmengine.guest.MMEngineHook` that this class uses."""

    guest: Any
    ran: bool
    overridden: frozenset[str]

    def begin_run(self) -> None: ...
    def call(self, stage: str, **arguments: Any) -> None: ...


class GuestCalls(GuestRunner):
    """The runner that guests get, with the methods that their adapters call."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch_open: list[Adapter] = []  # the adapters whose guests have not had `after_train_epoch` of the present epoch
        self._named = False

    def enter(self, run: Any) -> None:
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
        self._adapters.append(adapter)

    def leads(self, adapter: Adapter) -> bool:
        """Return True for the first adapter, which does the work that is done once for all guests."""
        return self._adapters[0] is adapter

    def call(self, guest: Any, stage: str, **arguments: Any) -> None:
        self._calling.append(guest)
        try:
            getattr(guest, stage)(self, **arguments)
        finally:
            self._calling.pop()

    def begin(self, *, trains: bool, now: bool = False) -> None:
        """Call ``before_run`` of all guests, and ``before_train`` in a training: once the data is known, or ``now``."""
        trains = trains and not self.trains and (now or self.run.data.train is not None)
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
        checkpoint[ENTRY] = entry_of(self.message_hub, self.param_schedulers, self._wrappers())

    def meta(self) -> dict[str, Any]:
        """Return the facts that MMEngine's checkpoints have under ``"meta"``, for hooks that read them or add to them."""
        facts = {"epoch": self.epoch, "iter": self.iter, "seed": self.seed, "experiment_name": self.experiment_name}
        return {**facts, "time": time.strftime("%Y%m%d_%H%M%S"), "mmengine_version": mmengine.__version__}

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
                epoch_length=self.run.data.epoch_length,
                max_epochs=self.max_epochs,
                max_iters=self.max_iters,
            )
        if self._entry is not None:
            restore_schedulers(self.param_schedulers, self._wrappers(), self._entry)
            for group, values in zip(groups, before, strict=True):
                group.update(values)


_RUNNER: Final = Slot("MMEngine runner", GuestCalls)


def join(run: Any, adapter: Adapter, own: GuestCalls) -> GuestCalls:
    """Add an adapter to the runner of the run, in the order of priorities. The first keeps the runner of its earlier run."""
    runner: GuestCalls | None = run.shared.get(_RUNNER)
    if runner is None:
        runner = run.shared[_RUNNER] = own
        runner.enter(run)
    runner.add(adapter)
    return runner
