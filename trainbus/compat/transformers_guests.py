"""``TransformersHook``: run a callback of Hugging Face's Trainer on a bus."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from trainbus.eventloop import Priority, SubscribeError, get_logger
from trainbus.eventloop.bus import GuestHook
from trainbus.eventloop.events import BeforeRun, Event, Slot
from trainbus.eventloop.registry import register
from trainbus.hooks.options import added_late

if TYPE_CHECKING:  # it imports transformers
    from trainbus.compat.transformers_trainer import TrainerFacade

log = get_logger()

TRAINER = Slot("the Trainer that callbacks of Hugging Face see", object)

_BASE: Final = "transformers.trainer_callback.TrainerCallback"
_ITERATIONS: Final = ("before_train_iter", "after_train_iter")
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "on_epoch_begin": _ITERATIONS,  # of iteration-based training, which has one long epoch
    "on_epoch_end": _ITERATIONS,
    "on_step_begin": _ITERATIONS,
    "on_substep_end": _ITERATIONS,
    "on_pre_optimizer_step": ("before_optimizer_step", *_ITERATIONS),
    "on_optimizer_step": ("after_optimizer_step", *_ITERATIONS),
    "on_step_end": _ITERATIONS,
    "on_log": _ITERATIONS,
    "on_prediction_step": ("after_val_iter", "after_test_iter"),
    "on_save": ("checkpoint_staged", "checkpoint_committed", "checkpoint_failed", "checkpoint_skipped", *_ITERATIONS),
}
"""The mount points that a method of a callback needs, besides those published a few times per epoch."""


@register
class TransformersHook(GuestHook):
    """A callback of Hugging Face's ``Trainer``. ``bus.add(callback)`` makes this hook; make it yourself to give it options.

        bus.add(ProgressCallback(), TransformersHook(EarlyStoppingCallback(3), args={"metric_for_best_model": "accuracy"}))

    - All callbacks on a bus are called together, as in a Trainer, in the order of the bus. They share ``state``, ``control``
      and ``args``. A method that a callback does not override is not called.
    - An optimizer step is a step. One that a gradient scaler skips does not count, unlike in a Trainer.
    - The epochs of iteration-based training are the passes over its loader.
    - ``logs`` has the loss, the gradient norm and the learning rate, at the steps that ``args.logging_steps`` and
      ``logging_strategy`` name, and the metrics of validations, with ``eval_`` before their names. The gradient norm is the
      one that the run reports (``OptimizerHook(grad_clip=)``, ``run.report(grad_norm=)``), or that of the gradients after the
      step, if they are still there. ``state.log_history`` has the lines of the training if a callback overrides ``on_log``.
    - ``control.should_training_stop`` becomes ``run.stop()``, ``should_epoch_stop`` ``run.end_epoch()``, ``should_save``
      ``run.checkpoints.save()``, ``should_evaluate`` ``run.validate_now()``, and ``should_log`` a call of ``on_log``. The loop
      decides when to validate, and ``CheckpointHook`` when to save: ``args.eval_strategy`` and ``save_strategy`` decide only if
      a ``DefaultFlowCallback`` is on the bus as well.
    - ``on_save`` is called on the training thread, some iterations later, when the checkpoint is durable, with the ``state`` of
      the moment that was saved, once for each step; on the rank that writes. The checkpoint is ours: ``args.output_dir`` has no
      ``checkpoint-<step>``.
    - Checkpoints hold ``state`` and the attributes that an ``ExportableState`` callback exports.

    Args:
        callback: the callback.
        args: ``TrainingArguments`` for all callbacks on the bus, or options for them as a mapping. By default, and for all
            other options, they follow from the run: ``output_dir`` is the work dir, ``metric_for_best_model`` is ``"loss"``.
        processing_class: the tokenizer or processor that callbacks get.

    Raises:
        SubscribeError: ``callback`` is not a ``TrainerCallback``, or overrides no method that a run calls.
        ConfigurationError: later: two hooks on the bus have different ``args``.
        TrainingError: later: a callback uses an attribute that a run does not have, or asks for something that this run does
            not do. The error names the callback.
    """

    priority = Priority.VERY_LOW

    def __init__(self, callback: Any, *, args: Any = None, processing_class: Any = None) -> None:
        super().__init__(callback)
        self.args = args
        self.processing_class = processing_class
        self.methods = _overridden(callback)  # the methods that the callback overrides
        self.observes = type(callback).__module__.startswith("transformers.")
        self._trainer: TrainerFacade | None = None

    def unused(self) -> Collection[str]:
        """Return the mount points that only methods of other callbacks need."""
        needed = {mount_point for method in self.methods for mount_point in _NEEDED.get(method, ())}
        return {mount_point for some in _NEEDED.values() for mount_point in some} - needed

    def before_run(self, event: BeforeRun) -> None:
        from trainbus.compat.transformers_trainer import TrainerFacade

        run = event.run
        found = run.shared.get(TRAINER)
        self._trainer = found if isinstance(found, TrainerFacade) else TrainerFacade(run)
        run.shared[TRAINER] = self._trainer
        run.defer(self._leave)  # a hook does not keep a run alive
        self._trainer.join(self)

    def _leave(self) -> None:
        self._trainer = None

    def _forward(self, event: Event) -> None:
        if self._trainer is None:
            raise added_late(self.label)
        self._trainer.handle(event)

    before_train = before_train_epoch = before_train_iter = before_optimizer_step = after_optimizer_step = _forward
    after_train_iter = after_train_epoch = after_train = after_run = _forward
    before_val = after_val_iter = after_val_epoch = before_test = after_test_iter = after_test_epoch = _forward
    before_save_checkpoint = after_load_checkpoint = _forward
    checkpoint_staged = checkpoint_committed = checkpoint_failed = checkpoint_skipped = _forward


def _overridden(callback: Any) -> frozenset[str]:
    kinds = type(callback).__mro__
    base = next((kind for kind in kinds if f"{kind.__module__}.{kind.__qualname__}" == _BASE), None)
    shown = type(callback).__name__
    if base is None:
        raise SubscribeError(f"TransformersHook takes a transformers.TrainerCallback object, not {callback!r}")
    methods = {name for name in dir(base) if name.startswith("on_")}
    own = {name for name in methods if name in vars(callback) or getattr(type(callback), name) is not getattr(base, name)}
    if not own - {"on_push_begin"}:
        raise SubscribeError(f"{shown} overrides no method that a run calls, such as on_step_end or on_log")
    if "on_push_begin" in own:
        log.warning(
            "a run does not push to the hub, so this method is never called",
            id="transformers-push-never-comes",
            hook=shown,
            method="on_push_begin",
        )
    return frozenset(own)
