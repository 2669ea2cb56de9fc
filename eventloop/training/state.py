"""The state of a run: its counts, its open scopes, and the requests of other threads.

:class:`trainbus.eventloop.training.driver.Driver` advances it from mount point to mount point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.errors import RunCancelled, TrainingError
from trainbus.eventloop.events import Event, LearningRateSet, Progress, RunPaused, RunResumed, Stage
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.body import Beginning, copied_states
from trainbus.eventloop.training.coordinator import Coordinator, Requests
from trainbus.eventloop.training.copies import copied
from trainbus.eventloop.training.machine import EPOCH, ITERATION, TRAIN, Counters, Machine
from trainbus.eventloop.training.optimizers import set_learning_rate
from trainbus.eventloop.training.rng import get_rng_state

log = get_logger()

_LOOK: float = 0.02
"""Seconds after which a paused run looks again at the requests. A signal handler could not notify a lock safely."""


class ValidationPlan:
    """When a training validates.

    Args:
        validate: validates once.
        due: returns True after an iteration that a validation follows, in iteration-based training.
    """

    def __init__(self, validate: Callable[[], object], due: Callable[[], bool] | None = None) -> None:
        self.validate = validate
        self.due = due
        self.asked = False
        """True from ``run.validate_now()`` to the next validation."""

    def ask(self) -> None:
        """Validate after the current iteration, epoch or validation."""
        self.asked = True

    @property
    def comes_next(self) -> bool:
        """True if a validation is due after the iteration that was counted last."""
        return self.due is not None and self.due()

    @property
    def follows(self) -> bool:
        """True if a validation follows the iteration that ends here."""
        return self.asked or self.comes_next


class Interrupted(NamedTuple):
    """What an iteration has while a validation or test runs in its body."""

    progress: Progress
    outputs: dict[str, Any]
    batch: Any


class Again(NamedTuple):
    """The states with which a body that has not stepped begins once more: those at its first validation."""

    bus: Any
    stateful: dict[str, Any]
    rng: dict[str, Any]
    validations: int
    tests: int


class RunState:
    """Hold the state of a run and the requests of other threads, which take effect at the next safe mount point."""

    def __init__(
        self,
        counters: Counters,
        optimizers: Mapping[str, torch.optim.Optimizer],
        stateful: Mapping[str, Any],
        bus: Bus,
        host: Any,
    ) -> None:
        self.counters = counters
        self.progress: Progress = counters.snapshot()
        self.version = 0
        """Grows with each iteration and after each handler that may have changed the state of the run."""
        self._validated = -1  # the version that was validated last
        self._validated_here = False  # in the body of the present iteration, behind its step
        self.machine = Machine()
        self.outputs: dict[str, Any] = {}
        self._lost = self._told_step = False
        self.end_left: Callable[[], object] = bool
        self.stepped: dict[int, int] = {}
        """How often each optimizer, by ``id``, has stepped in the current iteration."""
        self.between_steps: list[Callable[[torch.optim.Optimizer, Progress], object]] = []
        """Called before an optimizer steps again in an iteration."""
        self.in_handlers = False
        """True while handlers of the run's events are called, but for those in an iteration."""
        self.holds = False
        """True while the body of an epoch of the user's own loop is open: a save behind its batches waits for its end."""
        self.by_calls = False
        """True in a loop of calls of ``run.drive()``: a save waits for the next call, and so for the code between the two."""
        self.interrupted: Interrupted | None = None
        """What the present iteration has, while a validation or test runs in its body."""
        self.again: Again | None = None
        """The states of the first validation in the body of the present iteration, if no step came before."""
        self.batch_rng: dict[str, Any] | None = None
        """Random states at the beginning of the body of the present iteration, in a loop that validates there."""
        self.beginning: Beginning | None = None
        """The states at the beginning of the open body of an epoch; None if there is none, or nothing is saved."""
        self.finished: list[dict[str, Any]] = []
        """The metrics of the finished passes of that body; empty ones for a pass of the training."""
        self.gradients: Mapping[str, Any] = {}
        """Those of an open accumulation window of the saved run, until the resumed run is where it was saved."""
        self.validation_rng: dict[str, Any] | None = None
        """Random states at the start of the current validation: a checkpoint saved in it repeats it."""
        self.validation_stateful: dict[str, Any] = {}
        """Likewise those of ``stateful`` objects, but for large ones."""
        self._large: set[str] = set()
        self.trains = bool(optimizers)
        """True if the run is a training and locks its directories when it begins."""
        self.has_trained = False
        """True once ``before_train`` was published: only then do saves write files."""
        self._first = 0  # iterations before this program's
        self.resumed = False
        """True if the run resumed from a checkpoint."""
        self.plan: ValidationPlan | None = None
        """The validations of a ``TrainLoop`` that trains; None in a loop that decides this itself."""
        self._endings: list[Callable[[], object]] = []
        self.own = Requests()
        """The requests of this process, which other threads and signal handlers make."""
        self.join(Coordinator(self.own))
        self._save_if_asked: Callable[[], object]
        self._host = host
        self._optimizers, self._stateful = optimizers, stateful
        self._bus = bus
        self._refusal: Callable[[], object] | None = None

    @property
    def training(self) -> bool:
        """True from ``before_train`` to the end of training."""
        return TRAIN in self.machine

    @property
    def stops(self) -> bool:
        """True once a stop has taken effect on all ranks; it may wait for the step of an accumulation window."""
        return self.agreed.stop

    def why_stopped(self) -> str:
        """Return why the run ended before it was complete; empty if it was complete, or nothing says when it is."""
        if (reason := self.own.reason or self.agreed.reason) or self.stops:
            return reason or "run.stop() was called"
        return self.counters.lacking() if self.has_trained else ""

    @property
    def window_open(self) -> bool:
        """True inside an accumulation window."""
        is_open: bool = self._host.window_open
        return is_open

    def save_by(self, save_if_asked: Callable[[], object]) -> None:
        """Call ``save_if_asked`` in a pause, for a checkpoint that ``checkpoints.save()`` asked for."""
        self._save_if_asked = save_if_asked

    def leave_by(self, end_left: Callable[[], object]) -> None:
        """Call ``end_left`` before a step while an iteration is open: its body may have been left."""
        self.end_left = end_left

    def only_evaluate(self) -> None:
        """Note that the run only validates or tests: it locks no directories."""
        self.trains = False

    def end_by(self, end: Callable[[], object]) -> None:
        """Call ``end`` when the training has ended and its last state is saved, unless an exception ends it."""
        self._endings.append(end)

    def end_training(self) -> None:
        """Call what was registered for the end of the training."""
        endings, self._endings = self._endings, []
        for end in endings:
            end()

    def validate_by(self, plan: ValidationPlan | None) -> None:
        """Follow the plan of a ``TrainLoop`` that trains."""
        self.plan = plan

    def forget(self) -> None:
        """Drop references to the data when the run ends."""
        self.plan = None
        self._endings = []
        self.between_steps.clear()
        self.outputs = {}
        self.holds, self.interrupted, self.again, self.batch_rng = False, None, None, None
        self.beginning, self.finished, self.gradients = None, [], {}

    def enter_handlers(self) -> bool:
        """Note that handlers of the run's events are called; return what was noted before."""
        before, self.in_handlers = self.in_handlers, True
        return before

    def leave_handlers(self, before: bool) -> None:
        """Note what was noted before."""
        self.in_handlers = before

    def join(self, coordinator: Coordinator) -> None:
        """Agree with other ranks by a coordinator."""
        self.coordinator = coordinator
        self.agreed = coordinator.agreed
        """The requests in force, on all ranks."""
        self.alone = self.agreed is self.own  # each iteration asks: a call costs it a microsecond

    def leave(self) -> None:
        """Agree with no other rank any longer."""
        left = self.coordinator
        self.join(Coordinator(self.own))
        left.close()

    def check_open(self, methods: str) -> None:
        """Raise TrainingError if the run is not open."""
        if not self.machine.is_open:
            raise TrainingError(
                f"{methods} can only be called in a run that has begun and not ended: write `with Run(...) as run:` around the "
                "loop"
            )

    def lose(self, entries: Iterable[str]) -> None:
        """Log once that entries were reported between two iterations."""
        if not self._lost:
            self._lost = True
            log.warning(
                "run.report() was called between two iterations, so these entries are lost: call it in the body of run.train() "
                "or run.validate(), or in a hook's method of an iteration; EvaluateHook logs values of an epoch",
                id="reported-between-iterations",
                entries=", ".join(entries),
            )

    def tell_step_outside(self) -> None:
        """Log once that an optimizer has stepped while no iteration is open."""
        if not self._told_step:
            self._told_step = True
            log.warning(
                "an optimizer has stepped outside of the body of run.train(): no hook sees this update, and it is not counted. "
                "A run that resumes in this epoch may repeat it or leave it out. Step in that body, or in that of a second "
                "run.train(loader)",
                id="step-outside-iteration",
                epoch=self.counters.epoch,
            )

    def set_progress(self, stage: Stage = "train", batch_idx: int | None = None) -> None:
        """Give the events that follow the present counts."""
        counters = self.counters
        self.progress = counters.snapshot(stage, batch_idx)
        if self.interrupted is not None and self.stepped:  # these weights have the step of this iteration
            self.progress = replace(self.progress, iter=counters.iter + 1, update=counters.update + self.steps)

    @property
    def begins_again(self) -> bool:
        """True in a validation in the body of an iteration that has not stepped: a run that resumes from here repeats it."""
        return self.interrupted is not None and not self.stepped

    def wait_for_calls(self, *, waits: bool) -> None:
        """Note whether the loop is made of calls."""
        self.by_calls = waits

    def begin_body(self, beginning: Beginning | None, *, own: bool) -> None:
        """Begin the body of the next epoch; ``own``: of the user's own loop."""
        self.holds, self.beginning, self.finished = own, beginning, []
        self.counters.begin_body(self.counters.epoch if own else None)

    def enter_body(self, epoch: int, place: int) -> None:
        """Enter the body of an epoch again, of which the saved run has come to a place."""
        self.holds = True
        self.counters.begin_body(epoch, place)

    def leave_body(self, *, ended: bool = False) -> None:
        """Hold no save any longer; with ``ended``, no body is open."""
        self.holds = False
        if ended:
            self.beginning = None
            self.counters.begin_body(None)

    def begin_with(self, beginning: Beginning | None) -> None:
        """Note how the open body began."""
        self.beginning = beginning

    def draw_batch_from(self, rng: dict[str, Any] | None) -> None:
        """Note the random states at the beginning of the body of an iteration; None if nothing needs them."""
        self.batch_rng = rng

    def resume_body(
        self,
        beginning: Beginning | None,
        metrics: Iterable[dict[str, Any]],
        batch_rng: dict[str, Any] | None,
        gradients: Mapping[str, Any],
    ) -> None:
        """Take what a save has of an open body."""
        self.beginning, self.finished = beginning, [*metrics]
        self.batch_rng, self.gradients = batch_rng, gradients

    @property
    def save_waits(self) -> bool:
        """True where a save waits for the end of the body that the run is in, or for its next step."""
        if self.interrupted is not None:
            return bool(self.stepped)
        return self.by_calls or (self.holds and EPOCH not in self.machine)

    def interrupt_iteration(self, batch: Any) -> None:
        """Begin a validation or test in the body of an iteration."""
        self.interrupted = Interrupted(self.progress, self.outputs, batch)
        if self.again is None and not self.stepped:
            stateful = {name: copied(thing.state_dict()) for name, thing in self._stateful.items()}
            counters = self.counters
            bus = copied(self._bus.state_dict())
            self.again = Again(bus, stateful, get_rng_state(), counters.validations, counters.tests)

    def continue_iteration(self) -> Any:
        """End a validation or test in the body of an iteration; return the batch."""
        if self.interrupted is None:
            return None
        self.progress, self.outputs, batch = self.interrupted
        self.interrupted = None
        return batch

    def begin_iteration(self, progress: Progress) -> None:
        """Begin an iteration, without outputs and steps."""
        self.progress = progress
        self.outputs = {}
        self.stepped.clear()

    def begin_train_iteration(self) -> None:
        """Begin the next iteration of the training, which also becomes the phase of a run that resumes from here."""
        self.progress = self.counters.snapshot()
        self.outputs = {}
        self.stepped.clear()
        self.again = None
        self._validated_here = False
        if self.counters.phase != "train":
            self.go_on()
        self.machine.enter(ITERATION)

    def begin_evaluation_iteration(self, stage: Stage, index: int) -> None:
        """Begin an iteration of a validation or test. The steps are still those of the last iteration of the training."""
        self.set_progress(stage, index)
        self.drop_outputs()

    def drop_outputs(self) -> None:
        """Begin anew without outputs; events keep theirs."""
        self.outputs = {}

    def count_iteration(self) -> None:
        """Count the iteration that ends here."""
        self._validated += self._validated_here and self._validated == self.version
        self.version += 1
        # The plan asks the counts of the iterations that are done.
        self.counters.end_iteration(max(self.stepped.values()) if self.stepped else 0)
        if self.plan is not None and self.plan.follows:
            self.counters.go_to_phase("val")

    @property
    def steps(self) -> int:
        """The steps of the present iteration: of several optimizers, the most."""
        return max(self.stepped.values(), default=0)

    def step_again(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a further step of an optimizer in the same iteration, which is an update of its own."""
        for call in self.between_steps:
            call(optimizer, self.progress)
        steps = self.stepped[id(optimizer)]
        if steps == max(self.stepped.values()):
            self.progress = replace(self.progress, update=self.counters.update + steps)

    def note_change(self, changed: bool = True) -> None:
        """Advance the version if handlers may have changed the state."""
        self.version += changed

    def validate_next(self) -> None:
        """Make a validation the next phase of the training, which a resumed run begins with."""
        self.counters.go_to_phase("val")

    def begin_validation(self) -> None:
        """Begin a validation inside the training: a run that resumes from here repeats it."""
        if self.plan is not None:
            self.plan.asked = False
        self.validate_next()
        self.validation_rng = get_rng_state()
        self.validation_stateful = copied_states(self._stateful, self._large)

    def count_evaluation(self, stage: Stage) -> None:
        """Count the validation or test that ends here."""
        self.counters.end_evaluation(stage)

    def begin_epoch(self, *, resumes: bool) -> None:
        """Begin an epoch; one that ``resumes`` keeps the number of its batches."""
        self.go_on()
        if not resumes:
            self.counters.begin_epoch()
        self.set_progress()

    def show_last_iteration(self) -> None:
        """Give the end of an epoch the progress of its last iteration, also if the run has resumed or validated behind it."""
        counters = self.counters
        if self.progress.iter != counters.iter:
            return
        self.set_progress()
        if counters.batches:
            # Before its last step, as the iteration itself shows it.
            update = counters.update - (self.steps > 0)
            self.progress = replace(self.progress, iter=counters.iter - 1, batch_idx=counters.batches - 1, update=update)

    def count_epoch(self, *, cut: bool) -> None:
        """Count the epoch that ends here; without a plan, a validation follows it."""
        validates = self.plan is None or self.plan.due is None  # else the last iteration has told it
        self.counters.end_epoch(validates=validates, cut=cut)

    def begin_training(self) -> None:
        """Begin the training: from here on, saves write files."""
        self.has_trained, self._first = True, self.counters.iter
        self.set_progress()

    @property
    def ran_whole(self) -> bool:
        """True if this program has trained, and nothing has stopped it."""
        return self.has_trained and self.counters.iter > self._first and not self.stops

    @property
    def validated(self) -> bool:
        """True if the present state was validated: the last metrics are its own."""
        return self._validated == self.version

    def note_validated(self) -> None:
        """Note that the present state was validated; the end of the present iteration does not change it, if it has stepped."""
        self._validated = self.version
        self._validated_here = self.interrupted is not None and bool(self.stepped)

    def resume(self, *, validated: bool = False) -> None:
        """Note that the counts are those of a checkpoint, and whether its state was ``validated``."""
        self.resumed = True
        self._validated = self.version if validated else -1
        self.set_progress()

    def go_on(self) -> None:
        """Make training the next phase, also for a run that resumes from a later checkpoint."""
        self.counters.go_to_phase("train")
        self.validation_rng, self.validation_stateful = None, {}

    def refuse(self, refusal: Callable[[], object]) -> None:
        """Call ``refusal``, which raises an error, at the next safe mount point."""
        self.join(Coordinator(self.own))
        self.own.cancelled, self._refusal = True, refusal

    def check_cancelled(self) -> None:
        """Raise RunCancelled if the run was cancelled."""
        if self.agreed.cancelled:
            if self._refusal is not None:
                self._refusal()
            raise RunCancelled("the run was cancelled")

    @property
    def urgent(self) -> bool:
        """True if the ranks have agreed on more than a save: to stop, pause, end or set a learning rate."""
        agreed = self.agreed
        return agreed.stop or agreed.cancelled or agreed.paused or bool(agreed.rates)

    def handle_requests(self) -> None:
        """Handle requests at a safe mount point: end a cancelled run, wait while it is paused, set learning rates."""
        agreed = self.agreed
        if not (agreed.cancelled or agreed.paused or agreed.rates):
            return  # the usual case
        self.check_cancelled()
        if agreed.paused and not agreed.stop:
            self._wait()
        if agreed.rates:
            around: Callable[[Callable[[], None]], None] | None = self._host.around_rates
            if around is None:
                self._set_rates()
            else:
                around(self._set_rates)

    def should_stop(self) -> bool:
        """Handle requests; return True if the run must stop here. A stop waits for the step of an accumulation window."""
        self.handle_requests()
        return self.agreed.stop and not self.window_open

    def collect_requests(self) -> None:
        """Collect the requests of all ranks."""
        self.coordinator.agree(between=True)
        if self.coordinator.pauses_at_once:
            self.handle_requests()

    def _wait(self) -> None:
        self._publish(RunPaused)
        log.info("the run is paused", iter=self.counters.iter)
        while (agreed := self.agreed).paused and not (agreed.stop or agreed.cancelled):
            if agreed.save:
                self._save_if_asked()
            time.sleep(_LOOK)
            self.coordinator.agree(between=True)  # all ranks together, or some would time out in a collective of the training
        self.check_cancelled()
        self._publish(RunResumed)
        log.info("the run continues", iter=self.counters.iter)

    def _set_rates(self) -> None:
        wanted = self.agreed.take_rates()
        for rate, names in wanted:
            for name in names:
                set_learning_rate(self._optimizers[name], rate)
            log.info("the learning rate was set", lr=rate, optimizers=", ".join(names), iter=self.counters.iter)
            self._publish(LearningRateSet, lr=rate, optimizers=list(names))
        self.note_change(bool(wanted))

    def _publish(self, event: type[Event], **fields: Any) -> None:
        if self._bus.wants(event):
            self._bus.publish(event(progress=self.counters.snapshot(self.progress.stage), **fields))
