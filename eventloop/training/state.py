"""The order of the mount points of a run, step by step: what is published, counted, saved and undone, and when.

The iterators (:mod:`eventloop.training.iterators`) say that something begins or ends; here is what that means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from eventloop import events as ev
from eventloop.errors import RunCancelled, TrainingError
from eventloop.events import Event, Progress, Stage
from eventloop.training.arguments import stepping
from eventloop.training.data import Feed
from eventloop.training.distributed.ranks import Agreement, Ranks
from eventloop.training.distributed.shares import forward_alone
from eventloop.training.metrics import Metrics
from eventloop.training.progress import Counters
from eventloop.training.rng import get_rng_state
from eventloop.training.scopes import Scopes
from eventloop.training.seeded import set_epoch, set_sampler_epoch

_EVALUATION: dict[str, tuple[type[Event], ...]] = {
    "val": (ev.BeforeVal, ev.BeforeValEpoch, ev.BeforeValIter, ev.AfterValIter, ev.AfterValEpoch, ev.AfterVal),
    "test": (ev.BeforeTest, ev.BeforeTestEpoch, ev.BeforeTestIter, ev.AfterTestIter, ev.AfterTestEpoch, ev.AfterTest),
}


class Save(Protocol):
    """Makes the save that hooks have asked for, if any."""

    def __call__(self, *, force: bool = False) -> None:
        """Save; in the middle of an accumulation window only by ``force``."""


class Order:
    """The moving parts of a run: counters, open scopes, the current iteration.

    Args:
        counters: of the run.
        publish: of the run.
        save: makes a requested save.
        lock: keeps other trainings out of the directories of the run.
        window_open: True in the middle of an accumulation window.
        may_change: True if a handler of an event may change the state of the run.
        models: of the run; they are in evaluation mode during validation and test.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        publish: Callable[..., None],
        save: Save,
        lock: Callable[[], None],
        window_open: Callable[[], bool],
        may_change: Callable[[type[Event]], bool],
        models: Iterable[torch.nn.Module],
    ) -> None:
        self.counters = counters
        self.progress: Progress = counters.snapshot()
        self.version = 0
        """Moves when the state of the run may have changed: with each iteration, and where a handler may have changed it."""
        self.scopes = Scopes()
        self.outputs: dict[str, Any] = {}
        self.stepped: set[int] = set()
        """Which optimizers have stepped in the current iteration, by ``id``."""
        self.endless = False
        self.feed: Feed | None = None
        self.validation_rng: dict[str, Any] | None = None
        """Random states at the start of the validation under way: a checkpoint made in it begins it anew."""
        self.nothing_left = False
        """True while a resumed run is between an epoch and its validation: nothing of that epoch is left to train."""
        self.validation_follows: Callable[[], bool] = _never
        # No threading.Event: its lock is not re-entrant, and a signal handler may set these.
        self.cancelled = self.stop = self.save_now = False
        self.stop_reason = ""
        self._why: Callable[[], object] = _never
        self.has_trained = False
        """True once ``before_train`` was published: from then on there is something to save."""
        self.resumed = False
        """True if the run goes on from a checkpoint."""
        self.agreement: Agreement | None = None
        """Where there are other ranks: what all of them stop for."""
        self._in_step = False
        self._publish = publish
        self._save = save
        self._lock = lock
        self._window_open = window_open
        self._may_change = may_change
        self._evaluation_changes = False
        self._models = list(models)
        self._batch: Any = None
        self._training: object | None = None  # whose epoch is open
        self._left = False  # its body was left with `break`
        self._evaluating: object | None = None

    def should_stop(self) -> bool:
        """Return True once a stop takes effect; inside an accumulation window it waits for the window's step.

        Raises:
            RunCancelled: the run was cancelled. All iterators ask here, which makes it a safe mount point.
        """
        self.check_cancelled()
        stop = self.stop if self.agreement is None else self.agreement.stop
        return stop and not self._window_open()

    def refuse(self, why: Callable[[], object]) -> None:
        """Have the run go on no further: the next safe mount point calls ``why``, which raises an error."""
        self.agreement, self.cancelled, self._why = None, True, why

    def check_cancelled(self) -> None:
        """Raise RunCancelled if the run was cancelled."""
        if self.cancelled if self.agreement is None else self.agreement.cancelled:
            self._why()
            raise RunCancelled("the run was cancelled")

    @property
    def ranks(self) -> Ranks | None:
        """All processes, where there are several."""
        return None if self.agreement is None else self.agreement.ranks

    def settle(self) -> None:
        """Wait for what other ranks have asked for, if there are any."""
        if self.agreement is not None:
            self.agreement.settle()

    def tell(self, event: type[Event], **payload: Any) -> None:
        """Publish an event between iterations, and move the version if a handler may have changed the state."""
        self._publish(event, **payload)
        self.version += self._may_change(event)

    # --------------------------------------------------------------------------------------------------- training

    def go_on(self) -> None:
        """Note that training comes next, also for a run that is resumed from a checkpoint made from now on."""
        self.counters.phase = "train"
        self.validation_rng = None

    @property
    def training(self) -> bool:
        """True from ``before_train`` to the end of training; false in a validation or test outside of it."""
        return "train" in self.scopes

    def begin_train(self) -> None:
        """Publish ``before_train``, once."""
        if not self.training:
            self.check_open("run.epochs() and run.train()")
            self._lock()
            self.scopes.enter("train")
            self.has_trained = True
            self.progress = self.counters.snapshot()
            self._publish(ev.BeforeTrain)

    def end_train(self) -> None:
        """Publish ``after_train`` if training had begun."""
        if self.training:
            self.progress = self.counters.snapshot()
            self.tell(ev.AfterTrain)
            self._save(force=True)
            self.scopes.leave("train")

    def begin_epoch(self, feed: Feed, batches: object, *, endless: bool) -> None:
        """Publish ``before_train_epoch``; the data's iterator is made after it, so that hooks can still seed samplers.

        Args:
            feed: the training data.
            batches: the iterable of this epoch.
            endless: the data begins anew within the epoch when it is used up.

        Raises:
            TrainingError: another epoch is under way, whose body was not left.
        """
        self.begin_train()
        if self._training is not None and not self._left:
            raise TrainingError(
                "run.train() begins in the body of another run.train(), whose epoch has not ended; iterate over the inner "
                "loader itself, or end the outer epoch first, by `break` out of its `for` statement"
            )
        self.end_epoch()
        self._training, self._left = batches, False
        self.feed = feed
        self.endless = endless
        self.scopes.enter("epoch")
        self.go_on()
        if not feed.resuming:
            self.counters.batches = feed.passes = 0
        self.progress = self.counters.snapshot()
        set_epoch(feed.loader, self.counters.epoch + feed.passes)
        self._publish(ev.BeforeTrainEpoch)
        if endless:  # after the hooks, which know the epoch but not the pass that a resumed run goes on with
            set_sampler_epoch(feed.loader, self.counters.epoch + feed.passes)
        feed.begin()

    def leave_epoch(self, batches: object) -> None:
        """Note that the body of ``batches`` was left: with ``break``, if its epoch is still open."""
        self._left = self._left or self._training is batches

    def go_on_in_epoch(self, batches: object) -> bool:
        """Go on where the body of ``batches`` was left; return False if that epoch has ended since."""
        if self._training is not batches:
            return False
        if self._left:
            self._left = False
            self._drop_iteration()
        return True

    def begin_pass(self, feed: Feed) -> None:
        """Begin the data anew within the epoch, in another order: no mount point marks this for a hook."""
        feed.passes += 1
        set_epoch(feed.loader, self.counters.epoch + feed.passes)
        set_sampler_epoch(feed.loader, self.counters.epoch + feed.passes)
        feed.begin()

    def end_epoch(self) -> None:
        """Publish ``after_train_epoch`` if an epoch is open, and count it."""
        if "epoch" not in self.scopes:
            return
        self._drop_iteration()
        self.tell(ev.AfterTrainEpoch)
        self.counters.epoch += 1
        self.counters.batches = 0
        self.counters.phase = "val" if self.counters.max_iters is None else "train"
        if self.feed is not None:
            self.feed.end()
        self.settle()
        self._save(force=True)
        self._training = None
        self.scopes.leave("epoch")

    def break_epoch(self) -> None:
        """End the epoch in its middle, without its ``after_train_epoch``."""
        self._drop_iteration()
        self._training = None
        self.scopes.leave("epoch")

    def begin_iteration(self, batch: Any) -> None:
        """Publish ``before_train_iter``."""
        self.progress = self.counters.snapshot()
        self.outputs = {}
        self.stepped.clear()
        self._batch = batch
        self.go_on()
        self.scopes.enter("iter")
        self._publish(ev.BeforeTrainIter, batch_idx=self.counters.batches, batch=batch)

    def end_iteration(self) -> None:
        """Publish ``after_train_iter`` if an iteration is open, count it, and save if somebody asked."""
        if "iter" not in self.scopes:
            return
        self._publish(ev.AfterTrainIter, batch_idx=self.counters.batches, batch=self._batch, outputs=self.outputs)
        self._count_iteration()
        if self.agreement is not None:
            self.agreement.exchange()
        self._save()
        self.scopes.leave("iter")

    @property
    def last_batch(self) -> bool:
        """True if the current training batch is the last one of its epoch (or of an iteration-based run)."""
        if self.counters.max_iters is not None and self.counters.iter + 1 >= self.counters.max_iters:
            return True
        return not self.endless and self.feed is not None and self.feed.last

    def watch_steps(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Count and publish the steps of ``optimizer`` until the innermost scope ends, whoever makes them."""
        # GradScaler does not call step() for a step that it skips, so torch's own hooks see the real ones only.
        inner = stepping(optimizer)
        before = inner.register_step_pre_hook(partial(self._before_step, name, optimizer))
        after = inner.register_step_post_hook(partial(self._after_step, name, optimizer))
        self.scopes.defer(before.remove)
        self.scopes.defer(after.remove)

    def _before_step(self, name: str, optimizer: torch.optim.Optimizer, *step: Any) -> None:
        self._publish(ev.BeforeOptimizerStep, name=name, optimizer=optimizer)

    def _after_step(self, name: str, optimizer: torch.optim.Optimizer, *step: Any) -> None:
        self.stepped.add(id(optimizer))
        self._publish(ev.AfterOptimizerStep, name=name, optimizer=optimizer)

    def _drop_iteration(self) -> None:
        """End an iteration that the body left with ``break``; its batch is used up all the same."""
        if "iter" in self.scopes:
            self._count_iteration()
            self.scopes.leave("iter")

    def _count_iteration(self) -> None:
        self.version += 1
        self.counters.iter += 1
        self.counters.batches += 1
        self.counters.update += bool(self.stepped)
        self.counters.phase = "val" if self.validation_follows() else "train"

    # ---------------------------------------------------------------------------------------- validation and test

    def close_training(self) -> None:
        """End a training iteration that is still open, and its epoch, too, if the body was left with ``break``."""
        self.abandon_evaluation()
        if self._left:
            self.end_epoch()
        self.end_iteration()

    def begin_evaluation(self, stage: Stage, batches: object, length: int | None = None) -> None:
        """Publish ``before_val`` and ``before_val_epoch`` (or the same of a test), in evaluation mode, without gradients.

        Args:
            stage: ``"val"`` or ``"test"``.
            batches: the iterable of this evaluation.
            length: batches, if that is known. Ranks with as many each can stop in its middle, others only at its end.
        """
        self.check_open("run.validate() and run.test()")
        lengths = [length] if self.agreement is None else self.agreement.ranks.gather(length)
        self._in_step = len(lengths) > 1 and length is not None and set(lengths) == {length}
        # A validation outside of training (TrainLoop.val) is no phase of it: a later run does not begin with it.
        if stage == "val" and self.training:
            self.counters.phase = "val"
            self.validation_rng = get_rng_state()
        self.scopes.enter(stage)
        self._evaluating = batches
        if len(lengths) > 1 and not self._in_step:
            self.scopes.defer(forward_alone(self._models, lengths))
        self.progress = self.counters.snapshot(stage, 0)
        self._evaluation_mode()
        before, before_epoch, before_iter, after_iter, *_ = _EVALUATION[stage]
        self._evaluation_changes = self._may_change(before_iter) or self._may_change(after_iter)
        self.tell(before)
        self.tell(before_epoch)

    def begin_evaluation_iteration(self, stage: Stage, index: int, batch: Any) -> None:
        """Publish ``before_val_iter`` (or ``before_test_iter``)."""
        self.progress = self.counters.snapshot(stage, index)
        self.outputs = {}
        self._batch = batch
        self.scopes.enter("evaluation iter")
        self._publish(_EVALUATION[stage][2], batch_idx=index, batch=batch)

    def end_evaluation_iteration(self, stage: Stage, index: int, metrics: Metrics, samples: int = 1) -> None:
        """Publish ``after_val_iter`` (or ``after_test_iter``), and feed the metrics with outputs that count ``samples``."""
        self._publish(_EVALUATION[stage][3], batch_idx=index, batch=self._batch, outputs=self.outputs)
        self.version += self._evaluation_changes
        metrics.update(self.outputs, samples)
        if self._in_step and self.agreement is not None:
            self.agreement.exchange()
        self._save()
        self.scopes.leave("evaluation iter")

    def end_evaluation(self, stage: Stage, metrics: Mapping[str, Any]) -> None:
        """Publish ``after_val_epoch`` with the metrics, and ``after_val`` (or the same of a test)."""
        if stage == "val":
            self.go_on()
        self.tell(_EVALUATION[stage][4], metrics=dict(metrics))
        self.counters.validations += stage == "val"
        self.counters.tests += stage == "test"
        self.settle()
        # Also within an accumulation window (its gradients are saved, too): the best weights are those that were validated.
        self._save(force=True)
        self._evaluating = None
        self.scopes.leave(stage)
        self.tell(_EVALUATION[stage][5])
        self._save()

    def abandon_evaluation(self) -> None:
        """End a validation or test that was left in its middle, by ``break`` or a stop, without its ``after_x``."""
        self._evaluating = None
        for scope in ("val", "test"):
            self.scopes.leave(scope)

    def leave_evaluation(self, batches: object) -> bool:
        """End the evaluation of ``batches`` if it is open, as :meth:`abandon_evaluation` does; return whether it was.

        Called where nothing can be raised. The scope around it raises instead, when it ends.
        """
        if self._evaluating is not batches:
            return False
        try:
            self.abandon_evaluation()
        except BaseException as error:  # noqa: BLE001 - raised later
            self.scopes.defer(partial(_raise, error))
        return True

    def check_open(self, methods: str) -> None:
        """Raise TrainingError outside of the run."""
        if "run" not in self.scopes:
            raise TrainingError(
                f"{methods} belong into a run that has begun and not ended: write `with Run(...) as run:` around the loop"
            )

    def forget_data(self) -> None:
        """Let go of what leads to the loader."""
        self.feed = self._training = self._evaluating = None
        self.validation_follows = _never

    def _evaluation_mode(self) -> None:
        modes = [(module, module.training) for model in self._models for module in model.modules()]
        gradients = torch.is_grad_enabled()

        def restore() -> None:
            torch.set_grad_enabled(gradients)
            for module, mode in modes:
                module.training = mode

        self.scopes.defer(restore)
        for model in self._models:
            model.eval()
        torch.set_grad_enabled(False)


def _never() -> bool:
    return False


def _raise(error: BaseException) -> None:
    raise error
