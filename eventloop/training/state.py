"""The state of a run: its counts, its open scopes, and what other threads have asked it to do.

:class:`eventloop.training.driver.Driver` moves it from mount point to mount point.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Annotated, Any, Literal

import msgspec
import torch

from eventloop.errors import RunCancelled, TrainingError, stopped
from eventloop.events import Progress, Stage
from eventloop.log import get_logger
from eventloop.training.distributed.ranks import Agreement, Ranks
from eventloop.training.optimizers import set_learning_rate

log = get_logger()

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

_LOOK: float = 0.05
"""Seconds between two looks of paused ranks at what the others ask for."""


class Counters(msgspec.Struct):
    """The counts of a run. ``phase`` says what a resumed run does first: go on training, or validate.

    ``batches`` counts training batches used up in the current pass over the loader, ``validations`` and ``tests`` the passes
    that have ended.
    """

    epoch: Count = 0
    iter: Count = 0
    update: Count = 0
    batches: Count = 0
    validations: Count = 0
    tests: Count = 0
    max_epochs: int | None = None
    max_iters: int | None = None
    phase: Literal["train", "val"] = "train"

    def snapshot(self, stage: Stage = "train", batch_idx: int | None = None) -> Progress:
        """Return the frozen form that events carry."""
        return Progress(
            epoch=self.epoch,
            iter=self.iter,
            update=self.update,
            batch_idx=self.batches if batch_idx is None else batch_idx,
            validation=self.tests if stage == "test" else self.validations,
            max_epochs=self.max_epochs,
            max_iters=self.max_iters,
            stage=stage,
        )

    def state_dict(self) -> dict[str, int | str]:
        """Return the entries of a checkpoint. Limits are left out, so that a resumed run may go further."""
        kept = ("epoch", "iter", "update", "batches", "validations", "tests", "phase")
        return {name: getattr(self, name) for name in kept}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Load the result of :meth:`state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


def how_far(state: Any) -> tuple[int, ...]:
    """Return how far the run of a checkpoint had come, for comparison; () for another kind of file."""
    progress = state.get("progress") if isinstance(state, Mapping) else None
    if not isinstance(progress, Mapping):
        return ()
    # Iterations first: the other counts move between two of them.
    counts = [progress.get(name, 0) for name in ("iter", "epoch", "validations", "tests")]
    return tuple(counts) if all(type(count) is int for count in counts) else ()


class Scopes:
    """A stack of named scopes (run, train, epoch, iter, val …), each with functions to call when it ends."""

    def __init__(self) -> None:
        # Two lists side by side: several look-ups an iteration, so they must be quick.
        self._names: list[str] = []
        self._undos: list[list[Callable[[], object]]] = []
        self._cut_short: Callable[[], object] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def innermost(self) -> str:
        """Name of the innermost open scope, or ""."""
        return self._names[-1] if self._names else ""

    def enter(self, name: str) -> None:
        """Open a scope inside the innermost one."""
        self._undos.append([])
        self._names.append(name)

    def defer(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the innermost scope ends; last registered, first called.

        Register it before the action that it reverts, and let it find out how much there is to revert: Ctrl-C may strike at
        any moment. If Ctrl-C strikes while ``undo`` is called, it is called once more.

        Raises:
            RuntimeError: no scope is open.
            TypeError: ``undo`` is the result of a call instead of a function.
        """
        if not callable(undo):
            raise TypeError(f"run.defer() takes a function to call later, not {undo!r}: write run.defer(f), not run.defer(f())")
        if not self._names:
            raise RuntimeError("run.defer() was called outside of a run, so the function would never be called")
        self._undos[-1].append(undo)

    def leave(self, name: str) -> None:
        """End the scope ``name`` and every scope still open inside it.

        All deferred functions are called; the first error among them is raised once they all were.
        """
        first: Exception | None = None
        while name in self._names:
            undos = self._undos[-1]
            while undos:
                try:
                    self._call(undos)
                except Exception as error:
                    log.exception("a deferred function failed", scope=name)
                    first = first or error
            self._names.pop()
            self._undos.pop()
        if first is not None:
            raise first

    def unwind(self) -> None:
        """End all scopes after an exception. Errors of deferred functions are only logged: the user must see the first one.

        A Ctrl-C in here is raised after the last scope has ended.
        """
        interrupted: BaseException | None = None
        while self._names:
            try:
                self.leave(self._names[-1])
            except Exception:  # noqa: BLE001, S112 - logged by leave()
                continue
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _call(self, undos: list[Callable[[], object]]) -> None:
        """Call the last of ``undos``; one that Ctrl-C cuts short stays in the list, once."""
        undo = undos[-1]
        try:
            undo()
        except Exception as error:
            undos.pop()
            if isinstance(error, StopIteration):  # the iterators of the run end scopes
                raise stopped(error, f"the deferred function {getattr(undo, '__qualname__', undo)!s}") from error
            raise
        except BaseException:
            if undo is self._cut_short:
                undos.pop()
            self._cut_short = undo
            raise
        undos.pop()


class RunState:
    """The state of a run, and the requests of other threads, which take effect at the next safe mount point.

    Args:
        counters: of the run.
        optimizers: of the run, by name.
        window_open: returns True in the middle of an accumulation window.
    """

    def __init__(
        self, counters: Counters, optimizers: Mapping[str, torch.optim.Optimizer], window_open: Callable[[], bool]
    ) -> None:
        self.counters = counters
        self.progress: Progress = counters.snapshot()
        self.version = 0
        """Moves when the state of the run may have changed: with each iteration, and where a handler may have changed it."""
        self.scopes = Scopes()
        self.outputs: dict[str, Any] = {}
        self.stepped: set[int] = set()
        """Which optimizers have stepped in the current iteration, by ``id``."""
        self.validation_rng: dict[str, Any] | None = None
        """Random states at the start of the validation under way: a checkpoint made in it begins it anew."""
        self.trains = bool(optimizers)
        """True if the run begins for a training, and has its directories to itself from its beginning on."""
        self.has_trained = False
        """True once ``before_train`` was published: from then on there is something to save."""
        self.resumed = False
        """True if the run goes on from a checkpoint."""
        self.validation_follows: Callable[[], bool] = never
        """Tells after each iteration whether a validation comes next (in iteration-based training)."""
        self.agreement: Agreement | None = None
        """What all ranks stop, pause and save for, where there are several."""
        # No threading.Event: its lock is not re-entrant, and a signal handler may set these.
        self.cancelled = self.stop = self.save_now = self.paused = False
        self.stop_reason = ""
        self.rates: deque[tuple[float, tuple[str, ...]]] = deque()
        """Learning rates to set, and the names of their optimizers."""
        self._optimizers = optimizers
        self._window_open = window_open
        self._why: Callable[[], object] = never
        self._wake: SimpleQueue[None] = SimpleQueue()  # its put() is re-entrant

    @property
    def training(self) -> bool:
        """True from ``before_train`` to the end of training; false in a validation or test outside of it."""
        return "train" in self.scopes

    @property
    def ranks(self) -> Ranks | None:
        """All processes, where there are several."""
        return None if self.agreement is None else self.agreement.ranks

    def check_open(self, methods: str) -> None:
        """Raise TrainingError outside of the run."""
        if "run" not in self.scopes:
            raise TrainingError(
                f"{methods} can only be called in a run that has begun and not ended: write `with Run(...) as run:` around the "
                "loop"
            )

    def go_on(self) -> None:
        """Note that training comes next, also for a run that resumes from a checkpoint made from now on."""
        self.counters.phase = "train"
        self.validation_rng = None

    # --------------------------------------------------------------------------------------------- what others ask for

    def wake(self) -> None:
        """Wake a paused run, so that it sees new requests; safe from any thread and from signal handlers."""
        self._wake.put(None)

    def refuse(self, why: Callable[[], object]) -> None:
        """Have the run go on no further: the next safe mount point calls ``why``, which raises an error."""
        self.agreement, self.cancelled, self._why = None, True, why
        self.wake()

    def check_cancelled(self) -> None:
        """Raise RunCancelled if the run was cancelled."""
        if self.cancelled if self.agreement is None else self.agreement.cancelled:
            self._why()
            raise RunCancelled("the run was cancelled")

    def heed(self) -> None:
        """Do what was asked for: end a cancelled run, wait while it is paused, set learning rates. A safe mount point.

        Raises:
            RunCancelled: the run was cancelled.
        """
        if self.agreement is None and not (self.cancelled or self.paused or self.rates):
            return  # as after nearly every iteration
        self.check_cancelled()
        if self.paused if self.agreement is None else self.agreement.paused:
            self._wait()
        if self.rates if self.agreement is None else self.agreement.rates:
            self._set_rates()

    def should_stop(self) -> bool:
        """Do what was asked for, and return True once a stop takes effect. In an accumulation window it waits for its step.

        Raises:
            RunCancelled: the run was cancelled.
        """
        self.heed()
        return (self.stop if self.agreement is None else self.agreement.stop) and not self._window_open()

    def settle(self) -> None:
        """Wait for what other ranks have asked for, if there are any."""
        if self.agreement is not None:
            self.agreement.settle()

    def _wait(self) -> None:
        log.info("the run is paused", iter=self.counters.iter)
        if self.agreement is None:
            while self.paused and not (self.stop or self.cancelled):
                self._wake.get()
        else:  # together, so that no rank waits in a collective of the training until that times out
            while self.agreement.paused and not (self.agreement.stop or self.agreement.cancelled):
                time.sleep(_LOOK)
                self.agreement.settle()
        self.check_cancelled()
        log.info("the run goes on", iter=self.counters.iter)

    def _set_rates(self) -> None:
        wanted = [self.rates.popleft() for _ in range(len(self.rates))]
        if self.agreement is not None:
            self.agreement.rates = False
            wanted = [one for some in self.agreement.ranks.gather(wanted) for one in some]
        for rate, names in wanted:
            for name in names:
                set_learning_rate(self._optimizers[name], rate)
            log.info("the learning rate was set", lr=rate, optimizers=", ".join(names), iter=self.counters.iter)
        self.version += bool(wanted)


def never() -> bool:
    """Return False."""
    return False
