"""``Driver``: the order of the mount points of a run, with one call for each step (push).

The iterators (:mod:`trainbus.eventloop.training.iterators`) and ``TrainLoop`` make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainbus.eventloop import events as ev
from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import ConfigurationError, RunStopped, TrainingError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.media import without_media
from trainbus.eventloop.training.arguments import Limit
from trainbus.eventloop.training.body import Beginning, Return
from trainbus.eventloop.training.coordinator import Requests
from trainbus.eventloop.training.data import Feed
from trainbus.eventloop.training.distributed.shares import Share, check_even, forward_alone, size_of
from trainbus.eventloop.training.machine import EPOCH, ITERATION, ITERATIONS, TRAIN, TURNS, Scope
from trainbus.eventloop.training.metrics import Metrics, NamedMetrics
from trainbus.eventloop.training.optimizers import enter_training_mode, in_training_mode, optimizers_in, parameters_of
from trainbus.eventloop.training.rng import get_rng_state, set_rng_state
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.capture import Capture
from trainbus.eventloop.training.session import Session
from trainbus.eventloop.user_errors import add_note

log = get_logger()

EvaluationStage = Literal["val", "test"]

AnyMetrics = NamedMetrics | Metrics


class Driver(Session):
    """Drive a run by calls, for control flow other than a ``for`` statement; ``run.drive()`` returns it.

        run = Run(bus, model=model, optimizer=optimizer)
        drive = run.drive()
        drive.begin_run()                                   # or `with run:` around the rest
        drive.begin_train(max_epochs=1)
        for batch in drive.begin_epoch(loader):
            drive.begin_iteration(batch)
            drive.end_iteration({"loss": learn(batch)})     # your forward, backward and step
            if drive.should_stop():
                drive.abandon_epoch()
                break
        else:
            drive.end_epoch()
        drive.end_train()
        drive.end_run()                                     # or, after an exception, drive.fail(error)

    Each call publishes its mount points, counts, writes requested saves, and ends its scope. The ``abandon_…`` calls end a
    scope early, without its ``after_x``. :meth:`Run.pause`, :meth:`Run.set_lr` and :meth:`Run.cancel` take effect at the end
    of an iteration. For :meth:`Run.stop`, check :meth:`should_stop`: calls that never do
    are ended by a stop in ``begin_iteration``, in order, by an exception.

    Raises:
        TrainingError: the call is out of turn; it names the expected calls and changes nothing.
        RunCancelled: :meth:`Run.cancel` was called; pass the error to :meth:`fail`.
    """

    feed: Feed | None = None
    """The data of the epoch."""
    asks = False
    """True once the loop has asked for a stop."""
    epoch_ends: bool | None = None
    """True if the open epoch must end after the current iteration; None if it cannot end early."""
    accumulate = 1
    """Batches of an accumulation window, as ``run.train(loader, accumulate=)`` gives it."""
    _begun = False  # an epoch, since the run began
    _abandoned = False  # the last epoch
    _batch: Any = None
    _last: bool | None = None
    _stage: EvaluationStage = "val"  # of the present evaluation
    _evaluated: Feed | None = None
    _metrics: Metrics | None = None
    """Those of the present evaluation; None if the trainer computes them."""
    _share: Share | None = None
    _index = 0
    _in_step = False
    _evaluation_changes = False
    _left = False  # the iteration that ends was left by `break`, and with it the epoch
    _scores: Mapping[str, Any] | None = None  # of a validation whose saves wait
    _repeats = False  # the iteration that begins, which has published its before_train_iter

    @property
    def scope(self) -> Scope:
        """The innermost part of the run that has begun and not ended."""
        return self.state.machine.innermost

    def __init__(self, run: SavedRun) -> None:
        super().__init__(run)
        self.returns = Return()
        self._tells_of_outputs = True  # in the first iteration of a run
        self._drawn_ahead = False  # a batch, before the end of the iteration of the last one
        self._large: set[str] = set()  # stateful objects that are too large to copy them in each epoch

    def should_stop(self) -> bool:
        """Return True if the run must end here: then call ``abandon_epoch``, ``end_train`` and ``end_run``.

        Blocks while the run is paused. A stop waits for the step of an accumulation window.
        """
        self.asks = True
        return self.state.should_stop()

    def _end_unasked(self) -> None:
        """End the run in order at a stop for which calls never ask: they would train on."""
        reason = self.state.why_stopped()
        log.warning(
            "the run was stopped, and these calls of run.drive() never ask for it: the run ends here, in order, by an "
            "exception; after each drive.end_iteration(), ask drive.should_stop(), and leave the loops if it is True",
            id="stop-not-asked-for",
            reason=reason,
        )
        self.abandon_epoch()
        self.end_train()
        self.end_run()
        raise RunStopped(reason)

    @property
    def validation_comes_first(self) -> bool:
        """True if a resumed run must validate first: its checkpoint was saved before or in a validation."""
        return self.state.counters.phase == "val"

    @property
    def last_batch(self) -> bool:
        """True if the current training batch is the last one of its epoch (or of an iteration-based run)."""
        counters = self.state.counters
        if counters.max_iters is not None and counters.iter + 1 >= counters.max_iters:
            return True
        return self._last if self._last is not None else self.feed is not None and self.feed.last

    @property
    def window_open(self) -> bool:
        """True between two batches of an accumulation window that ``run.train(loader, accumulate=)`` declares."""
        return self.accumulate > 1 and EPOCH in self.state.machine and self.state.counters.batches % self.accumulate > 0

    @check_options
    def begin_train(self, *, max_epochs: Limit | None = None, max_iters: Limit | None = None) -> None:
        """Publish ``before_train``. The limits are for hooks that need them: your code counts and ends the training.

        Raises:
            ConfigurationError: both limits were given.
        """
        turn = self.state.machine.turn("begin_train")
        if max_epochs is not None and max_iters is not None:
            raise ConfigurationError(f"max_epochs={max_epochs} and max_iters={max_iters}: give drive.begin_train() one of them")
        state = self.state
        with self._host.training():
            self._begin_stage()
            if max_epochs is not None or max_iters is not None:
                state.counters.limit(max_epochs, max_iters)
            state.machine.go(turn)
            state.begin_training()
            self._run.kept.begin_training()
            self._run.publish(*turn.events)
        if state.by_calls and state.beginning is not None and not self._begun:
            self.returns.begin(self._run)
        self._note_beginning()

    def end_train(self) -> None:
        """Publish ``after_train``."""
        turn = self.state.machine.turn("end_train")
        if self.state.by_calls:
            if not self.state.stops:
                self.state.go_on()  # no validation has followed the last epoch
            self.returns.arrive(self._run)
            if not self._abandoned:  # no code of the next epoch has run
                self.state.begin_with(None)
            self._save_before_call()
        self.state.set_progress()
        self._announce(*turn.events)
        self._checkpointer.save_if_asked(force=True)
        self.state.end_training()
        self.state.machine.go(turn)

    @check_options
    def begin_epoch(self, data: Iterable[Any] | None = None, *, endless: bool = False) -> Iterable[Any]:
        """Publish ``before_train_epoch``; return the batches of ``data`` on the device of the run.

        Take batches from the result, so that the run can save its position in the data. The iterator of ``data`` is made
        after the event, so that hooks can seed samplers.

        Args:
            data: the loader; None hides it. A resumed epoch then begins with batch ``run.progress.batch_idx``.
            endless: restart an exhausted loader within the same epoch (iteration-based training).
        """
        turn = self.state.machine.turn("begin_epoch")
        state = self.state
        returns = self.returns.pending and state.by_calls
        if returns:
            self._warn_of_validation()
            self.returns.arrive(self._run)
        if state.by_calls:
            state.go_on()
            self._save_before_call()
        feed = self.feed = None if data is None else self._run.feeds.for_training(data)
        ranks = state.coordinator
        if not endless:
            length = None if feed is None else feed.length
            loader = None if feed is None else feed.loader
            check_even(ranks, self._run.models.values(), length, loader, first=not self._begun)
        state.machine.go(turn)
        state.begin_epoch(resumes=(state.resumed and not self._begun) if feed is None else feed.resuming)
        self._begun, self._abandoned = True, False
        if feed is not None:
            feed.set_epoch(state.counters.epoch, endless=endless)
        self._run.publish(*turn.events)
        if feed is not None:
            feed.before_batch = self._save_before_batch if state.by_calls else bool
            rng = get_rng_state() if returns and feed.resuming and feed.used else None
            feed.start_pass()
            if rng is not None:  # the saved run has drawn the order before
                set_rng_state(rng)
        return () if feed is None else feed

    def end_epoch(self, *, cut: bool = False) -> None:
        """Publish ``after_train_epoch`` and count the epoch. A longer training goes on in one that a limit ``cut`` short."""
        state = self.state
        turn = state.machine.turn("end_epoch")
        state.show_last_iteration()
        self._announce(*turn.events)
        state.count_epoch(cut=cut)
        if self.feed is not None:
            self.feed.end(cut=cut)
        state.collect_requests()
        if not (state.holds or state.by_calls):
            self._checkpointer.save_if_asked(force=True)
        state.machine.go(turn)
        self._note_beginning()

    def abandon_epoch(self) -> None:
        """End the epoch early, without ``after_train_epoch``; a resumed run continues in it."""
        machine = self.state.machine
        turn = machine.turn("abandon_epoch")
        self._abandoned = True
        if self.state.by_calls and machine.innermost is EPOCH:
            self._save_before_call()
        if ITERATION in machine:
            self.abandon_iteration()
        machine.go(turn)

    def begin_iteration(self, batch: Any = None, *, last: bool | None = None, silent: bool = False) -> None:
        """Publish ``before_train_iter``, unless ``silent``.

        ``last`` tells whether it is the last batch of the epoch; None asks the data.
        """
        # This method and end_iteration() make few calls: after a step of the model each costs about a microsecond.
        state = self.state
        if state.machine.innermost is not EPOCH:
            state.machine.turn("begin_iteration")
        if state.by_calls:
            if self.feed is None or self._drawn_ahead:
                self._save_before_batch()
            self.returns.begin_batch(self._run)
        if state.agreed.stop and not self.asks and self._host.facts.own_loop and not state.window_open:
            self._end_unasked()
        state.begin_train_iteration()
        self._batch, self._last = batch, last
        if self._repeats:
            self._repeats = False
        elif not silent and self._run.wants(ev.BeforeTrainIter):
            event = ev.BeforeTrainIter(run=self._run, progress=state.progress, batch_idx=state.counters.batches, batch=batch)
            self._bus.publish(event)

    def end_iteration(self, outputs: Mapping[str, Any] | None = None, *, silent: bool = False) -> None:
        """Publish ``after_train_iter`` with ``outputs`` and reported outputs (``run.report()``), and count the iteration.

        ``silent`` only counts an iteration of which nothing was published.
        """
        state = self.state
        if state.machine.innermost is not ITERATION:
            state.machine.turn("end_iteration")
        if outputs is not None:
            self._take_outputs("end_iteration", outputs)
        if self._replicas is not None and not self._replicas.iteration_counts():
            self._repeat_iteration()
            return
        if not silent and self._run.wants(ev.AfterTrainIter):
            index, batch, progress = state.counters.batches, self._batch, state.progress
            event = ev.AfterTrainIter(run=self._run, progress=progress, batch_idx=index, batch=batch, outputs=state.outputs)
            self._bus.publish(event)
        state.count_iteration()
        agreed = state.agreed if state.alone else self._agree()
        if (self._checkpointer.requests or agreed.save) and not (state.by_calls or (state.holds and self._ends_pass)):
            self.save_held()
        state.machine.leave(ITERATION)
        if agreed.cancelled or agreed.paused or agreed.rates:
            state.handle_requests()

    def _agree(self) -> Requests:
        ranks, tells = self.state.coordinator, self._tells_of_outputs
        self._tells_of_outputs = False
        if tells and not ranks.rank and not self.state.outputs and self._run.wants(ev.AfterTrainIter):
            layout = ranks.layout
            if layout.apart or layout.data.shares:  # else the user reports nothing
                log.warning(
                    "rank 0 has reported nothing in the first iteration, and loggers, records and alerts have what rank 0 "
                    "reports: if its stage of the model has no loss, send it there (see the guide Beyond one node)",
                    id="rank-0-reports-nothing",
                )
        return ranks.agree()

    @property
    def _ends_pass(self) -> bool:
        """True if no batch comes behind the iteration that ends here, as far as that is known without a look at the data."""
        feed, counters = self.feed, self.state.counters
        if self._left:
            return True
        if counters.max_iters is not None and counters.iter >= counters.max_iters:
            return True
        return feed is not None and not feed.endless and feed.length is not None and feed.used >= feed.length

    def _note_beginning(self) -> None:
        """Note the states with which the code before the next epoch begins, in a loop of calls."""
        state = self.state
        if state.by_calls and state.machine.innermost is TRAIN and self._checkpointer.directories and not self.returns.pending:
            state.begin_with(Beginning.of(self._run, self._large))

    def _save_before_call(self) -> None:
        """Save what was requested before this call: the code behind the last one has run now."""
        if self._checkpointer.requests or self.state.agreed.save:
            self.save_held(force=True)

    def _save_before_batch(self) -> None:
        """Save what was requested before a batch is drawn, in a loop of calls."""
        if self.state.machine.innermost is not EPOCH:
            if not self._drawn_ahead:
                self._drawn_ahead = True
                log.warning(
                    "a batch was drawn before the iteration of the last one has ended, so a run that resumes from a save "
                    "between the two leaves it out: draw it behind drive.end_iteration()",
                    id="batch-drawn-early",
                )
        elif self._checkpointer.requests or self.state.agreed.save:
            self.save_held()

    def _warn_of_validation(self) -> None:
        if self.state.counters.phase == "val":
            log.warning(
                "the saved run was about to validate, and this one trains first, so it leaves that validation out: validate "
                "behind drive.begin_train() if drive.validation_comes_first",
                id="saved-validation-left-out",
            )

    def save_held(self, *, force: bool = False) -> None:
        """Save what was requested in a validation, or behind one, and has waited; with its scores, if it is the same state."""
        self._checkpointer.before_step = None
        scores, self._scores = self._scores, None
        if scores is not None and self.state.validated:
            self._checkpointer.note_scores(scores)
        self._checkpointer.save_if_asked(force=force)

    def _save_before_step(self) -> None:
        """Save what was requested in a validation between two steps of one body: the next one changes the weights."""
        counters = self.state.counters
        before = counters.saved()
        counters.end_iteration(self.state.steps)
        log.warning(
            "a save was requested in a validation between two optimizer steps of one body, so a run that resumes from it "
            "leaves out the rest of that body: validate behind the last step",
            id="save-between-steps",
            iter=before.iter,
        )
        try:
            self.save_held(force=True)
        finally:
            counters.restore(before)

    def leave_iteration(self) -> None:
        """End an iteration whose body was left without an exception: as any other if it has stepped, else abandon it."""
        if not self.state.stepped:
            self.abandon_iteration()
            return
        self._left = True
        try:
            self.end_iteration()
        finally:
            self._left = False

    def _repeat_iteration(self) -> None:
        """End an iteration whose step was not committed: its batch comes again, and nothing is counted."""
        state = self.state
        self._repeats = True
        if self.feed is not None:
            self.feed.repeat()
        state.coordinator.agree()
        state.machine.leave(ITERATION)
        state.handle_requests()

    def abandon_iteration(self) -> None:
        """End the iteration without ``after_train_iter``; its batch still counts as consumed.

        With replica groups, an iteration without a committed step does not count, and its batch comes again.
        """
        turn = self.state.machine.turn("abandon_iteration")
        if self._replicas is not None and not self._replicas.iteration_counts(complete=False):
            self._repeat_iteration()
            return
        self.state.count_iteration()
        self.state.machine.go(turn)

    def replace_batch(self, batch: Any, *, last: bool) -> None:
        """Set the batch of the current iteration behind its step, which has fetched the batch itself."""
        self._batch, self._last = batch, last

    def drop_iteration(self) -> None:
        """End the current iteration, if there is one, uncounted and without its ``after_x``: it found no batch."""
        machine = self.state.machine
        if machine.innermost in ITERATIONS:
            machine.leave(machine.innermost)

    @check_options
    def begin_evaluation(
        self, stage: EvaluationStage, data: Iterable[Any] | None = None, metrics: AnyMetrics | None = None
    ) -> Iterable[Any]:
        """Publish ``before_val`` and ``before_val_epoch``, in evaluation mode and without gradients; return the batches.

        Args:
            stage: ``"val"``; a ``"test"`` publishes ``before_test``, ``before_test_epoch`` and so on instead.
            data: the loader; None hides it.
            metrics: get the outputs of each iteration; scalar outputs are averaged in any case.
        """
        state = self.state
        turn = state.machine.turn(f"begin_evaluation {stage}")
        self._begin_stage()
        nested = state.machine.innermost is ITERATION
        if state.by_calls and nested:
            self.returns.reach_batch(self._run)
        elif state.by_calls:
            if stage == "val" and state.training:
                if state.counters.phase == "val":
                    self.returns.arrive(self._run)
                state.validate_next()
            self._save_before_call()
        if nested and state.interrupted is None:
            state.interrupt_iteration(self._batch)
        feed = None if data is None else self._run.feeds.for_evaluation(data, f"{stage}_data")
        self._stage, self._evaluated, self._metrics, self._index = stage, feed, None, -1
        if self._host.facts.own_loop:
            self._metrics = metrics if isinstance(metrics, Metrics) else self._run.feeds.metrics(metrics)
        self._share = None if feed is None else Share(feed.loader)
        length = None if feed is None else feed.length
        lengths, several = state.coordinator.distinct(length), state.coordinator.size > 1
        # Ranks with equal numbers of batches can stop early together; others stop at the end.
        self._in_step = several and len(lengths) == 1 and length is not None
        # Only a validation inside a training is a phase of it that a resumed run repeats.
        if stage == "val" and state.training and not nested:
            state.begin_validation()
        state.machine.go(turn)
        if several and not self._in_step:
            state.machine.defer(forward_alone(self._run.models.values(), lengths))
        state.set_progress(stage, 0)
        if self._host.facts.own_loop:
            self._enter_evaluation_mode()
        inner = state.machine.turn("begin_evaluation_iteration")
        within = (*inner.events, *TURNS[inner.to, "end_evaluation_iteration"].events)
        self._evaluation_changes = any(map(self._bus.internal.may_change_state, within))
        for event in turn.events:
            self._announce(event)
        if self._share is not None:
            state.machine.defer(self._share.leave_out())
        if self._metrics is not None:
            self._metrics.reset()
        return () if feed is None else feed

    def begin_evaluation_iteration(self, batch: Any = None) -> None:
        """Publish ``before_val_iter``."""
        machine = self.state.machine
        turn = machine.turn("begin_evaluation_iteration")
        self._index += 1
        self._batch = batch
        self.state.begin_evaluation_iteration(self._stage, self._index)
        machine.go(turn)
        self._run.publish(*turn.events, batch_idx=self._index, batch=batch)

    def end_evaluation_iteration(self, outputs: Mapping[str, Any] | None = None) -> None:
        """Publish ``after_val_iter`` with ``outputs`` and reported outputs (``run.report()``), and feed the metrics."""
        state = self.state
        turn = state.machine.turn("end_evaluation_iteration")
        if outputs is not None:
            self._take_outputs("end_evaluation_iteration", outputs)
        self._run.publish(*turn.events, batch_idx=self._index, batch=self._batch, outputs=state.outputs)
        state.note_change(self._evaluation_changes)
        if self._metrics is not None:
            share, batch = self._share, self._batch
            self._metrics.update(state.outputs, size_of(batch) if share is None else share.counts(self._index, batch))
        if self._in_step:
            state.coordinator.agree()
        if not state.save_waits:
            self._checkpointer.save_if_asked()
        state.machine.go(turn)
        state.handle_requests()

    def end_evaluation(self, metrics: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Publish ``after_val_epoch`` with the metrics, then ``after_val``; return them. ``metrics`` adds or replaces some."""
        state, feed, stage = self.state, self._evaluated, self._stage
        turn = state.machine.turn("end_evaluation")
        after_epoch, after = turn.events
        if feed is not None:
            if state.coordinator.size > 1 and not state.coordinator.merged(feed.used, max):
                feed.check_not_empty()
            feed.end()
        results = {**({} if self._metrics is None else self._metrics.compute(state.coordinator)), **(metrics or {})}
        if stage == "val":
            state.go_on()
        self._announce(after_epoch, metrics=dict(results))
        state.count_evaluation(stage)
        if stage == "val" and state.training:
            state.note_validated()
            self._checkpointer.note_scores(results)
            self._scores = results if state.save_waits else None
        if state.interrupted is not None and self._checkpointer.requests and state.stepped:
            self._checkpointer.before_step = self._save_before_step
        state.collect_requests()
        # force: save the validated weights even within an accumulation window, whose gradients are saved too.
        if not state.save_waits:
            self._checkpointer.save_if_asked(force=True)
        state.machine.go(turn)
        self._announce(after)
        if not state.save_waits:
            self._checkpointer.save_if_asked()
        self._batch = state.continue_iteration()
        state.handle_requests()
        self._note_beginning()
        return results

    def abandon_evaluation(self) -> None:
        """End the evaluation early, without ``after_val``; restore modes, gradients and weights."""
        machine = self.state.machine
        turn = machine.turn("abandon_evaluation")
        if self.state.by_calls and self.state.interrupted is None:
            self._save_before_call()
        machine.go(turn)
        self._batch = self.state.continue_iteration()

    def drop_evaluation(self) -> None:
        """Abandon the current evaluation, if there is one."""
        if self.state.machine.evaluates:
            self.abandon_evaluation()

    def measures(self, name: str) -> bool:
        """Return True if a metric of the open evaluation takes this entry of the outputs."""
        metrics = self._metrics
        machine = self.state.machine
        return metrics is not None and machine.innermost in ITERATIONS and machine.evaluates and metrics.takes(name)

    def _enter_evaluation_mode(self) -> None:
        machine, models = self.state.machine, self._run.models.values()
        machine.defer(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        for module in (module for model in models for module in model.modules()):
            machine.defer(partial(setattr, module, "training", module.training))
        for model in models:
            try:
                model.eval()
            except TypeError as error:  # its train() is another method
                add_note(error, f"run.validate() calls eval() of {type(model).__name__}, and that calls train(False)")
                raise
        for optimizer in self._run.optimizers.values():
            if in_training_mode(optimizer):
                machine.defer(partial(enter_training_mode, optimizer))
                optimizer.eval()  # type: ignore[attr-defined]  # of schedule-free ones
        torch.set_grad_enabled(False)

    def _take_outputs(self, call: str, outputs: object) -> None:
        if not isinstance(outputs, Mapping):
            kind = type(outputs).__name__
            raise TrainingError(f"drive.{call}() takes outputs by name, such as {{'loss': loss}}, and was given a {kind}")
        self.state.outputs.update(without_media(self._run, outputs))

    def _forget(self) -> None:
        self._run.feeds.forget()
        self.state.forget()
        self.feed = self._evaluated = self._share = self._batch = self._scores = None
        self._begun = self._repeats = self.asks = False
        self._tells_of_outputs = True


Step = Callable[..., None]
"""A function to call before or after a step of an optimizer; it ignores its arguments, as torch's step hooks have some."""


def around_step(
    run: SavedRun, name: str, optimizer: torch.optim.Optimizer, capture: Capture | None = None
) -> tuple[Step, Step]:
    """Return the functions to call before and after each step of an optimizer, which publish and count it.

    ``capture`` waits before a step for the copies that it makes beside the training.
    """
    publish, wants, state, saves, key = run.publish, run.wants, run.state, run.checkpointer, id(optimizer)
    stepped, own = state.stepped, capture is not None

    def outside() -> bool:
        return own and state.machine.innermost is not ITERATION and ITERATION not in state.machine

    def before_step(*step: Any) -> None:
        if own:
            state.end_left()
        if capture is not None and capture.overlap is not None:
            capture.overlap.fence()  # first, because a handler may change weights
        if own and saves.before_step is not None and not outside():
            saves.before_step()
        if key in stepped and not outside():
            state.step_again(optimizer)
        if wants(ev.BeforeOptimizerStep):
            publish(ev.BeforeOptimizerStep, name=name, optimizer=optimizer)

    def after_step(*step: Any) -> None:
        if own and state.machine.innermost is not ITERATION and ITERATION not in state.machine:  # as outside(), without a call
            state.tell_step_outside()
        else:
            stepped[key] = stepped.get(key, 0) + 1
        if wants(ev.AfterOptimizerStep):
            publish(ev.AfterOptimizerStep, name=name, optimizer=optimizer)

    return before_step, after_step


def watch_steps(run: SavedRun, capture: Capture | None = None) -> None:
    """Count and publish all steps by torch's step hooks until the run ends, as :func:`around_step`."""
    for name, optimizer in run.optimizers.items():
        # GradScaler does not call step() for a step that it skips, so torch's hooks see only real steps.
        inside = optimizers_in(optimizer)  # a wrapper may step the one inside without its own step()
        before_step, after_step = around_step(run, name, optimizer, capture)
        if len(inside) > 1:
            before_step, after_step = outermost(before_step, after_step)
        for inner in inside:
            run.state.machine.defer(inner.register_step_pre_hook(before_step).remove)
            run.state.machine.defer(inner.register_step_post_hook(after_step).remove)
    if capture is not None:
        _watch_others(run)


def _watch_others(run: SavedRun) -> None:
    """Tell once of each optimizer that steps weights of the run without being one of its optimizers."""
    known = {id(inner) for one in run.optimizers.values() for inner in (one, *optimizers_in(one))}

    def after_step(optimizer: torch.optim.Optimizer, *step: Any) -> None:
        if id(optimizer) in known:
            return
        known.add(id(optimizer))
        own = {id(weight) for model in run.models.values() for weight in model.parameters()}
        if any(id(weight) in own for weight in parameters_of(optimizer)):
            log.warning(
                f"an optimizer that the run does not have ({type(optimizer).__name__}) has stepped its weights: its steps are "
                "not counted, no hook sees them, and its state is in no checkpoint; give the run all optimizers, also those "
                "that are used later: optimizer={...}",
                id="unknown-optimizer-stepped",
            )

    run.state.machine.defer(register_optimizer_step_post_hook(after_step).remove)


def outermost(before_step: Step, after_step: Step) -> tuple[Step, Step]:
    """Return the functions for the hooks of an optimizer and those inside it, of which a step calls the outermost one's."""
    stepping: list[Any] = []

    def before(optimizer: Any, *step: Any) -> None:
        if not stepping or stepping[0] is optimizer:  # the second, if its last step failed
            stepping[:] = [optimizer]
            before_step(optimizer, *step)

    def after(optimizer: Any, *step: Any) -> None:
        if stepping and stepping[0] is optimizer:
            stepping.clear()
            after_step(optimizer, *step)

    return before, after
