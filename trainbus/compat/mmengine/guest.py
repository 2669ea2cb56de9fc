"""``MMEngineHook``: call a hook of MMEngine at its moments, with its arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any, Final

import torch
from mmengine.runner.priority import get_priority

from trainbus.compat.mmengine.calls import GuestCalls, join
from trainbus.compat.mmengine.entry import restore_averages
from trainbus.eventloop import events as ev
from trainbus.eventloop import mount
from trainbus.eventloop.bus import GuestHook
from trainbus.hooks.options import check_averages_alone

_UPDATED: Final = 31
"""The first priority after the optimizer update of ``TrainLoop``, because MMEngine steps before ``after_train_iter``."""

_STAGES: Final = (
    *("before_train_iter", "after_train_iter", "before_val_iter", "after_val_iter", "before_test_iter", "after_test_iter"),
    *("before_val_epoch", "after_val_epoch", "before_test_epoch", "after_test_epoch"),
)
"""The mount points that an adapter subscribes to only if its guest overrides their methods. It needs the others itself."""

_EMA: Final = "mmengine.hooks.ema_hook.EMAHook"
"""Exchanges the weights of model and averages in a validation, and relies on its end to exchange them again."""

_METRICS: Final[Mapping[str, str]] = {
    "mmengine.hooks.checkpoint_hook.CheckpointHook": "key_indicators",
    "mmengine.hooks.early_stopping_hook.EarlyStoppingHook": "monitor",
}
"""The attributes of MMEngine's own hooks that name metrics."""

_STATE: Final[Mapping[str, tuple[str, ...]]] = {
    "mmengine.hooks.early_stopping_hook.EarlyStoppingHook": ("best_score", "wait_count"),
}
"""The attributes to save of MMEngine's own hooks, which MMEngine forgets in a resume."""


class MMEngineHook(GuestHook):
    """A hook of MMEngine on a bus. The hooks of one bus share a :class:`~trainbus.compat.mmengine.runner.GuestRunner`.

    The priority is the guest's. In ``after_train_iter``, the priorities 0 to 39 become 31 to 39, because MMEngine calls
    that method after the optimizer step. A guest with ``state_dict`` and ``load_state_dict`` has its state in checkpoints.
    """

    def __init__(self, guest: Any) -> None:
        super().__init__(guest)
        self.priority = get_priority(guest.priority)
        self.overridden = frozenset(guest.get_triggered_stages())  # the names of the methods that the guest overrides
        self.ran = False  # True if the guest's `before_run` was called in the current run
        self._runner = GuestCalls()
        classes = [f"{base.__module__}.{base.__qualname__}" for base in type(guest).__mro__]
        self._saved = next((_STATE[name] for name in classes if name in _STATE), ())
        self._metrics = next((_METRICS[name] for name in classes if name in _METRICS), "")
        self._swaps = _EMA in classes
        self._swapped = False

    @property
    def updated_priority(self) -> int:
        own: int = get_priority(self.priority)
        return own if own >= 40 else _UPDATED + own * 9 // 40

    def unused(self) -> Collection[str]:
        return [stage for stage in _STAGES if stage not in self.overridden]

    def needs_metrics(self) -> Collection[str]:
        names = getattr(self.guest, self._metrics, None) or ()
        return {names} if isinstance(names, str) else {*names} - {"auto"}

    # ------------------------------------------------------------------------------------------------------- state

    @property
    def stateful(self) -> bool:
        return bool(self._saved) or (hasattr(self.guest, "state_dict") and hasattr(self.guest, "load_state_dict"))

    def state_dict(self) -> dict[str, Any]:
        if self._saved:
            return {name: getattr(self.guest, name) for name in self._saved}
        state: dict[str, Any] = self.guest.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._saved:
            self.guest.load_state_dict(state)
        for name in self._saved:
            setattr(self.guest, name, state[name])

    # ------------------------------------------------------------------------------------------------- calls of guests

    def call(self, stage: str, **arguments: Any) -> None:
        if stage in self.overridden:
            self._runner.call(self.guest, stage, **arguments)

    def begin_run(self) -> None:
        if not self.ran:
            self.ran = True
            self.call("before_run")

    def before_run(self, event: ev.BeforeRun) -> None:
        self.ran = False
        self._runner = join(event.run, self, self._runner)

    def after_load_checkpoint(self, event: ev.AfterLoadCheckpoint) -> None:
        if self._runner.leads(self):
            self._runner.restore(event.checkpoint)
        if "after_load_checkpoint" in self.overridden:
            if self._swaps:
                restore_averages(event.checkpoint)
            self.begin_run()
            self.call("after_load_checkpoint", checkpoint=event.checkpoint)

    def before_train(self, event: ev.BeforeTrain) -> None:
        self._runner.begin(trains=True)

    def before_train_epoch(self, event: ev.BeforeTrainEpoch) -> None:
        if self._swaps:
            check_averages_alone(self.label, event.run)
        self._runner.begin_epoch()
        if not self._runner.stops:
            self.call("before_train_epoch")

    def before_train_iter(self, event: ev.BeforeTrainIter) -> None:
        self.call("before_train_iter", batch_idx=self._runner.batch_index(event.batch_idx), data_batch=event.batch)

    @mount(priority=attrgetter("updated_priority"))
    def after_train_iter(self, event: ev.AfterTrainIter) -> None:
        # MMEngine gives the scalars that the model logs.
        outputs = {name: value for name, value in event.outputs.items() if _is_scalar(value)}
        index = self._runner.batch_index(event.batch_idx)
        self.call("after_train_iter", batch_idx=index, data_batch=event.batch, outputs=outputs)

    def after_train_epoch(self, event: ev.AfterTrainEpoch) -> None:
        self._runner.end_epoch(by=self)

    def before_val(self, event: ev.BeforeVal) -> None:
        self._runner.begin(trains=event.run.training)
        self.call("before_val")

    def before_val_epoch(self, event: ev.BeforeValEpoch | ev.BeforeTestEpoch) -> None:
        if self._swaps:  # undone also if the validation or test ends early
            self._swapped = True
            event.run.defer(self._swap_back)
        self.call(event.mount_point)

    def before_val_iter(self, event: ev.BeforeValIter | ev.BeforeTestIter) -> None:
        self.call(event.mount_point, batch_idx=event.batch_idx, data_batch=event.batch)

    def after_val_iter(self, event: ev.AfterValIter | ev.AfterTestIter) -> None:
        self.call(event.mount_point, batch_idx=event.batch_idx, data_batch=event.batch, outputs=event.outputs)

    def after_val_epoch(self, event: ev.AfterValEpoch | ev.AfterTestEpoch) -> None:
        self._swapped = False
        self.call(event.mount_point, metrics=_plain(event.metrics))

    before_test_epoch, before_test_iter = before_val_epoch, before_val_iter
    after_test_iter, after_test_epoch = after_val_iter, after_val_epoch

    def after_val(self, event: ev.AfterVal) -> None:
        self.call("after_val")
        self._runner.stop_if_asked()

    def before_save_checkpoint(self, event: ev.BeforeSaveCheckpoint) -> None:
        if self._runner.leads(self):
            self._runner.save(event.checkpoint)
        if "before_save_checkpoint" in self.overridden:
            self.begin_run()
            event.checkpoint.setdefault("meta", self._runner.meta())
            self._save(event.checkpoint)

    def after_train(self, event: ev.AfterTrain) -> None:
        if self._runner.trains:
            self._runner.end_epoch(by=None)
            self.call("after_train")

    def before_test(self, event: ev.BeforeTest) -> None:
        self._runner.begin(trains=False)
        self.call("before_test")

    def after_test(self, event: ev.AfterTest) -> None:
        self.call("after_test")

    def after_run(self, event: ev.AfterRun) -> None:
        if self.ran:
            self.call("after_run")

    # ------------------------------------------------------------------------------------------- the averages of EMAHook

    def _swap_back(self) -> None:
        if self._swapped:
            self._swapped = False
            self.call("after_val_epoch", metrics=None)

    def _save(self, checkpoint: dict[str, Any]) -> None:
        """Let the guest change a checkpoint. Within a validation, it gets the weights as they are outside of it."""
        if not self._swapped:
            self.call("before_save_checkpoint", checkpoint=checkpoint)
            return
        self.call("after_val_epoch", metrics=None)
        self.call("before_save_checkpoint", checkpoint=checkpoint)
        for key in ("state_dict", "ema_state_dict"):
            checkpoint[key] = {name: value.clone() for name, value in checkpoint[key].items()}
        self.call("before_val_epoch")


def _is_scalar(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with numbers for scalar tensors, like those of MMEngine's evaluators."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in metrics.items()
    }
