"""Begin and end a run: open the bus, join the other ranks, lock directories, and resume. Check the order of the calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from eventloop import events as ev
from eventloop.bus import Bus
from eventloop.checkpoint import AnyPath
from eventloop.errors import LaneFullError, RunCancelled, TrainingError
from eventloop.events import Event
from eventloop.events.run_view import RunView
from eventloop.log import get_logger
from eventloop.offload import Deadline
from eventloop.training.agree import Agreement, Alone
from eventloop.training.distributed.ranks import join_ranks, share_failure, world_size
from eventloop.training.folders import free_folder, move_aside, newest_run
from eventloop.training.locks import DirectoryLock
from eventloop.training.optimizers import stepping, warn_if_useless
from eventloop.training.rng import seed_everything
from eventloop.training.saves.capture import Saves
from eventloop.training.saves.restore import Restore
from eventloop.training.state import REPEATED, RunState
from eventloop.training.update import check_updates

log = get_logger()

_TURNS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "": ("before the run has begun or after it has ended", ("begin_run",)),
    "run": ("inside a run", ("begin_train", "begin_validation", "begin_test", "end_run")),
    "train": ("inside a training", ("begin_epoch", "begin_validation", "begin_test", "end_train")),
    "epoch": ("inside an epoch", ("begin_iteration", "begin_validation", "begin_test", "end_epoch", "abandon_epoch")),
    "iter": ("inside an iteration", ("end_iteration", "abandon_iteration", "abandon_epoch")),
    REPEATED: ("inside an iteration that is repeated after a resume", ("abandon_epoch",)),
    "val": ("inside a validation", ("begin_validation_iteration", "end_validation", "abandon_validation")),
    "val iter": ("inside an iteration of a validation", ("end_validation_iteration", "abandon_validation")),
    "test": ("inside a test", ("begin_test_iteration", "end_test", "abandon_test")),
    "test iter": ("inside an iteration of a test", ("end_test_iteration", "abandon_test")),
}
"""Words for each innermost scope, and the calls allowed in it. :meth:`Session.fail` is allowed in every open scope."""

DEFAULT_NAME: Final = "run"
"""Name of a run without ``name=`` and ``work_dir=``."""

_open: list[RunView] = []
"""Open runs of this process."""


class Session:
    """The part of a driver that begins and ends the run, and releases everything even after an error.

    ``moves`` moves the models to the device of the run.
    """

    _forget: Callable[[], None]  # the driver defines it; called when the run ends

    def __init__(self, run: RunView, bus: Bus, state: RunState, saves: Saves, restore: Restore, *, moves: bool) -> None:
        self.state = state
        self.loop_driven = False
        """True if a hook steps the optimizers; False if the body of the user's loop does."""
        self.own_folder = False
        """True if a training that begins or resumes by ``"auto"`` chooses its folder; see :mod:`eventloop.training.folders`."""
        self.host_folder = False
        """True if another trainer has chosen the folder: a new training moves the files of an earlier run there."""
        self._is_new = False  # a training without a work dir that begins anew
        self._run = run
        self._bus = bus
        self._saves = saves
        state.save_if_asked = saves.save_if_asked
        self._restore = restore
        self._moves = moves
        self._opened = False
        self._failed_by = 0  # the id of what begin_run() or end_run() raised; the error itself would keep all its frames
        self._patience: Deadline | None = None
        self._locks: dict[Path, DirectoryLock] = {}

    def begin_run(self) -> None:
        """Open the bus if it is idle, publish ``before_run``, and load the checkpoint to resume from.

        After an error, everything is closed.

        Raises:
            BusStateError: another run is open on the bus.
        """
        self._check_order("begin_run")
        self._patience = None
        self._number_name()
        try:
            self._bus.adopt_thread(
                self._run.name, self._interrupt, self.state.refuse, lambda: self.state.progress, self._saves.settle
            )
            if self._bus.state == "idle":
                self._bus.open()
                self._opened = True
        except BaseException as error:
            self._failed_by = id(error)
            self._close()
            raise
        try:
            self._begin()
        except BaseException as error:
            self._failed_by = id(error)
            self._abort(error)
            raise

    def end_run(self) -> None:
        """Publish ``after_run``, wait until all checkpoints are written, and close the bus if the run opened it."""
        self._check_order("end_run")
        state = self.state
        try:
            state.set_progress()
            if reason := state.own.reason or state.agreed.reason:
                self._run.info["stop_reason"] = reason
            self._announce(ev.AfterRun)
            self._saves.end()
            if state.ranks is not None:  # no rank leaves before all files are written; all ranks see a failure
                self._bus.raise_failures()
                state.settle()
            state.scopes.leave("run")
        except BaseException as error:
            self._failed_by = id(error)
            self._abort(error)
            raise
        self._close()
        if state.stops and not state.counters.complete and (line := self._saves.resume_line()):
            log.info(f"the run was stopped; {line}", iter=state.counters.iter, reason=reason)

    def fail(self, error: BaseException) -> None:
        """Publish ``on_exception``, end all scopes, and drain for at most the bus's ``abort_timeout`` seconds.

        The caller raises ``error``. Errors in here are logged and added to it as notes. An error of :meth:`begin_run` or
        :meth:`end_run` has ended the run already; then this does nothing.
        """
        if self._failed_by == id(error):
            return
        if not self.state.scopes.innermost:
            raise TrainingError("drive.fail() is out of turn: the run has not begun, or has ended; expected drive.begin_run()")
        self._abort(error)

    def _begin(self) -> None:
        run, state = self._run, self.state
        state.scopes.enter("run")
        ranks = join_ranks(self._bus, run.models, trains=bool(run.optimizers))
        state.join(Alone(state.own) if ranks is None else Agreement(ranks, state.own))
        self._is_new = False
        if self.own_folder and state.trains:
            self._choose_folder()
        state.scopes.defer(run.resume)  # so that a run entered again does not begin paused
        state.scopes.defer(run.shared.clear)
        state.scopes.defer(self._forget)
        check_updates(self._bus.hooks, loop_driven=self.loop_driven)
        self._warn_of_others()
        warn_if_useless(run.optimizers, run.models)
        if run.seed is not None:
            seed_everything(run.seed)
        for model in run.models.values() if self._moves else ():
            model.to(run.device)
        self._saves.open(state.ranks)
        for name, optimizer in run.optimizers.items():
            self._watch_steps(name, optimizer)
        if state.trains:
            self._lock()  # before a handler opens a file in them
        run.publish(ev.BeforeRun)
        if state.trains:
            self._lock()  # the directories that hooks added in before_run
        self._restore.load()

    def _abort(self, error: BaseException) -> None:
        """End the run after an exception; log errors in here and add them to it as notes."""
        self._share_failure(error)
        self._patience = Deadline(self._bus.abort_timeout)
        with ExitStack() as last:  # a second Ctrl-C, for example in a handler of on_exception, must not leave anything open
            last.callback(self._tell_resume, error)  # last of all: the lanes have written their checkpoints
            last.callback(self._close, abort=True)
            last.callback(self.state.scopes.unwind)
            try:
                self._bus.raise_failures()  # else the publish below raises them and reaches no handler
            except Exception as failure:
                log.exception("an offloaded handler failed as well")
                error.add_note(f"an offloaded handler failed at about the same time: {failure!r}")
            try:
                self._run.publish(ev.OnException, error=f"{type(error).__name__}: {error}", exception=error)
            except Exception as failure:
                log.exception("a handler of on_exception failed")
                error.add_note(f"then a handler of on_exception failed: {failure!r}")

    def _tell_resume(self, error: BaseException) -> None:
        """Add the line that resumes the run to an error; log it if the application or the trainer may replace the error."""
        if not (line := self._saves.resume_line()):
            return
        if isinstance(error, self._saves.hidden):
            reason = "cancelled" if isinstance(error, RunCancelled) else "interrupted"
            log.info(f"the run was {reason}; {line}", iter=self.state.counters.iter)
        else:
            error.add_note(line)

    def _share_failure(self, error: BaseException) -> None:
        """Share an error with the other ranks."""
        if world_size() > 1:
            share_failure(error)

    def _close(self, *, abort: bool = False) -> None:
        try:
            self._saves.close(math.inf if self._patience is None else self._patience.left)
        finally:
            self._bus.release_thread(self._interrupt)
            self._close_bus(abort=abort)

    def _close_bus(self, *, abort: bool) -> None:
        try:
            if self._opened:
                self._opened = False
                self._bus.close(abort=abort)
        finally:
            while self._locks:
                self._locks.popitem()[1].release()

    def _interrupt(self) -> None:
        """Raise if the training thread must not wait for room in a full lane; the bus calls this before each wait."""
        if self._patience is None:
            self.state.check_cancelled()
        elif not self._patience.left:
            raise LaneFullError(
                f"the run ends after an exception and waits at most {self._bus.abort_timeout:g} s for its lanes"
            )

    def _announce(self, event: type[Event], **payload: Any) -> None:
        """Publish an event between iterations, and advance the version if a handler may have changed the state."""
        self._run.publish(event, **payload)
        self.state.version += self._bus.may_change_state(event)

    def _lock(self) -> None:
        """Lock the directories of this training on rank 0; an error is raised on all ranks."""

        def lock() -> None:
            for path in self._saves.directories:
                # resolve(): links and ".." give one directory several names.
                if isinstance(path, Path) and (directory := path.resolve()) not in self._locks:
                    self._locks[directory] = DirectoryLock(directory)

        if self.state.ranks is None:
            lock()
        else:
            self.state.ranks.from_first(lock)

    def _choose_folder(self) -> None:
        """Choose the folder of a training that does not resume from a given checkpoint; all ranks use rank 0's choice."""
        run: Any = self._run
        self.own_folder = False  # a run that is entered again stays there
        restore, wanted = self._restore, run.work_dir
        if restore.given or self.state.counters.iter or self.state.counters.epoch:
            return
        if wanted is None:
            self._is_new = True
            return
        hooks = self._bus.hooks
        choose = partial(newest_run, wanted) if restore.automatic else partial(free_folder, wanted, hooks)
        folder = choose() if self.state.ranks is None else self.state.ranks.from_first(choose)
        if folder != wanted:
            what = "going on with the newest run of this name" if restore.automatic else "this work dir has a run already, so"
            log.info(what if restore.automatic else f"{what} this one gets a folder of its own", work_dir=str(folder))
            run.move_to(folder)

    def free_directory(self, wanted: AnyPath) -> AnyPath:
        """Return a directory of checkpoints for this run: another one if ``wanted`` has a run, and nothing tells them apart."""
        if not self._is_new:
            return wanted
        choose = partial(free_folder, wanted)
        folder = choose() if self.state.ranks is None else self.state.ranks.from_first(choose)
        if folder != wanted:
            log.info("this directory has a run already, so this one gets a directory of its own", directory=str(folder))
        return folder

    def _begin_stage(self) -> None:
        """Before the first stage of a training that does not resume, move the files of an earlier run aside."""
        run, state = self._run, self.state
        moves, self.host_folder = self.host_folder and state.trains, False
        if not moves or state.resumed or state.counters.iter or state.counters.epoch or run.rank or run.work_dir is None:
            return
        if (aside := move_aside(run.work_dir, self._bus.hooks)) is not None:
            log.warning(
                "this folder has an earlier run, and this training does not resume it; its files were moved", to=str(aside)
            )

    def _number_name(self) -> None:
        """Tell a run without a name and a work dir from the other open ones, for dashboards and streams."""
        run: Any = self._run
        taken = {other.name for other in _open}
        if run.work_dir is None and run.name == DEFAULT_NAME and run.name in taken:
            run.name = next(name for number in count(2) if (name := f"{DEFAULT_NAME}-{number}") not in taken)
            self.state.counters.run_name = run.name

    def _warn_of_others(self) -> None:
        """Warn about another open run if one of the two has a seed: both draw from the same random state."""
        for other in _open:
            if self._run.seed is not None or other.seed is not None:
                log.warning(
                    "two open runs in one process draw from the same random state, so seeds and resumes do not reproduce their "
                    "numbers; run one after the other, or each in its own process",
                    run=self._run.name,
                    other=other.name,
                )
        _open.append(self._run)
        self.state.scopes.defer(partial(_open.remove, self._run))

    def _watch_steps(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        # GradScaler does not call step() for a step that it skips, so torch's hooks see only real steps.
        before_step, after_step = self._around_step(name, optimizer)
        inner = stepping(optimizer)
        self.state.scopes.defer(inner.register_step_pre_hook(before_step).remove)
        self.state.scopes.defer(inner.register_step_post_hook(after_step).remove)

    def _around_step(self, name: str, optimizer: torch.optim.Optimizer) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the functions to call before and after each step of an optimizer; they ignore their arguments."""
        publish, wants, stepped, saves = self._run.publish, self._run.wants, self.state.stepped, self._saves

        def before_step(*step: Any) -> None:
            if saves.overlap is not None:
                saves.overlap.fence()  # first, because a handler may change weights
            if wants(ev.BeforeOptimizerStep):
                publish(ev.BeforeOptimizerStep, name=name, optimizer=optimizer)

        def after_step(*step: Any) -> None:
            stepped.add(id(optimizer))
            if wants(ev.AfterOptimizerStep):
                publish(ev.AfterOptimizerStep, name=name, optimizer=optimizer)

        return before_step, after_step

    def _check_order(self, call: str) -> None:
        """Raise TrainingError if the call is out of turn."""
        where, calls = _TURNS[self.state.scopes.innermost]
        if call not in calls:
            *most, last = (f"drive.{one}()" for one in calls)
            expected = f"{', '.join(most)} or {last}" if most else last
            raise TrainingError(f"drive.{call}() is out of turn {where}; expected {expected}")
