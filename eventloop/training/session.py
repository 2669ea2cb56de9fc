"""Begin and end a run: open and close the bus, report errors."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, Final

from trainbus.eventloop import events as ev
from trainbus.eventloop.errors import LaneFullError, RunCancelled, RunPreempted, TrainingError
from trainbus.eventloop.events import Event
from trainbus.eventloop.events.run_view import RunView
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.notebook import shorten
from trainbus.eventloop.offload import Deadline
from trainbus.eventloop.training.distributed.ranks import record_failure, share_failure
from trainbus.eventloop.training.folders import move_aside
from trainbus.eventloop.training.machine import Turn
from trainbus.eventloop.training.replicas import Replicas
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.user_errors import add_note, described
from trainbus.eventloop.world import world_size

log = get_logger()

DEFAULT_NAME: Final = "run"
"""Name of a run without ``name=`` and ``work_dir=``."""

open_runs: list[RunView] = []
"""Open runs of this process."""


class Session:
    """The part of a driver that begins and ends the run, and releases everything even after an error."""

    _forget: Callable[[], None]  # the driver defines it; called when the run ends

    def __init__(self, run: SavedRun) -> None:
        self.state = run.state
        self.on_close = ExitStack()
        """Called when the run has ended and its bus is closed, such as to release locks."""
        self._run, self._bus, self._host, self._checkpointer = run, run.bus, run.host, run.checkpointer
        self._looks_aside = True  # until the first stage begins
        self._replicas: Replicas | None = run.host.replicas
        self._opened = False
        self._failed_by = 0  # the id of what begin_run() or end_run() raised; the error itself would keep all its frames
        self._patience: Deadline | None = None  # after an exception
        self._ending: Deadline | None = None  # from the end of the run on

    def begin_run(self) -> None:
        """Open the bus if it is idle, publish ``before_run``, and load the checkpoint to resume from.

        After an error, everything is closed.

        Raises:
            BusStateError: another run is open on the bus.
        """
        turn = self.state.machine.turn("begin_run")
        self._patience = self._ending = None
        self._number_name()
        try:
            self._bus.internal.adopt_thread(
                self._run.name,
                self._interrupt,
                self.state.refuse,
                lambda: self.state.progress,
                self._checkpointer.wait_for_files,
                self._patience_now,
            )
            self._opened = self._bus.internal.join()
        except BaseException as error:
            self._failed_by = id(error)
            self._close()
            raise
        try:
            self._begin(turn)
        except BaseException as error:
            self._failed_by = id(error)
            self._abort(error)
            raise

    def end_run(self) -> None:
        """Publish ``after_run``, wait until all checkpoints are written, and close the bus if the run opened it.

        Raises:
            RunPreempted: the run of your own loop was stopped with an exit status, and has ended in order.
        """
        state, run = self.state, self._run
        turn = state.machine.turn("end_run")
        # By a stop that came before the end. On another thread, and in a trainer, the program decides.
        if state.stops and self._host.facts.own_loop and threading.current_thread() is threading.main_thread():
            run.exit_code = state.agreed.exit_code
        self._ending = Deadline(self._bus.drain_timeout)
        try:
            state.set_progress()
            if reason := state.why_stopped():
                self._run.info["stop_reason"] = reason
            self._checkpointer.wait()  # after_run comes behind the events of all checkpoints so far
            self._announce(*turn.events, stopped=bool(reason), reason=reason)
            self._checkpointer.end()
            if state.coordinator.size > 1:  # no rank leaves before all files are written; all ranks see a failure
                self._bus.internal.raise_failures()
                state.collect_requests()
            state.machine.go(turn)
        except BaseException as error:
            self._failed_by = id(error)
            self._abort(error)
            raise
        self._close()
        instead = state.own.instead or state.agreed.instead
        if state.stops and not state.counters.complete and (line := self._resume_line(instead)):
            log.info(f"the run was stopped; {line}", iter=state.counters.iter, reason=reason)
        if run.exit_code:
            raise RunPreempted(run.exit_code)

    def fail(self, error: BaseException) -> None:
        """Publish ``on_exception``, end all scopes, and drain for at most the bus's ``abort_timeout`` seconds.

        The caller raises ``error``. Errors in here are logged and added to it as notes. An error of :meth:`begin_run` or
        :meth:`end_run` has ended the run already; then this does nothing.
        """
        if not self.state.machine.is_open:
            if self._failed_by == id(error):
                return
            raise TrainingError("drive.fail() is out of turn: the run has not begun, or has ended; expected drive.begin_run()")
        self._abort(error)

    def _begin(self, turn: Turn) -> None:
        run, state = self._run, self.state
        machine = state.machine
        machine.go(turn)
        open_runs.append(run)
        machine.defer(partial(open_runs.remove, run))
        machine.defer(run.unpause)  # so that a run entered again does not begin paused
        machine.defer(run.shared.clear)
        machine.defer(self._forget)
        with self._host.beginning():
            run.publish(*turn.events)

    def _abort(self, error: BaseException) -> None:
        """End the run after an exception; log errors in here and add them to it as notes."""
        self._patience = patience = Deadline(self._bus.abort_timeout)
        with ExitStack() as last:  # a second Ctrl-C, for example in a handler of on_exception, must not leave anything open
            # last of all: the lanes have written their checkpoints
            last.push(lambda _, second, __: self._tell_resume(second if isinstance(second, KeyboardInterrupt) else error))
            last.callback(self._close, abort=True)
            last.callback(self.state.machine.unwind)
            last.callback(self._checkpointer.tell_waiting)
            # what was deferred comes behind the events of all saves
            last.callback(lambda: self._checkpointer.wait_for_files(patience.left))
            if self.state.coordinator.size > 1 and world_size() > 1:  # else the group was destroyed
                share_failure(error)
            record_failure(error)
            try:
                self._bus.internal.raise_failures()  # else the publish below raises them and reaches no handler
            except Exception as failure:
                log.exception("an offloaded handler failed as well", id="second-handler-failed")
                add_note(error, f"an offloaded handler failed at about the same time: {described(failure)}")
            try:
                self._run.publish(ev.OnException, error=described(error), exception=error)
            except Exception as failure:
                log.exception("a handler of on_exception failed", id="exception-handler-failed")
                add_note(error, f"then a handler of on_exception failed: {described(failure)}")

    def _tell_resume(self, error: BaseException) -> None:
        """Add the line that resumes the run to an error; log it if the application or the trainer may replace the error."""
        line = self._resume_line(getattr(error, "instead", ""))
        if isinstance(error, KeyboardInterrupt):
            done = f"the run was interrupted after iteration {self.state.counters.iter}"
            shorten(error, f"{done}; {line}" if line else done)
        if not line:
            return
        if isinstance(error, self._host.saver.hidden):
            reason = "cancelled" if isinstance(error, RunCancelled) else "interrupted"
            log.info(f"the run was {reason}; {line}", iter=self.state.counters.iter)
        else:
            add_note(error, line)

    def _resume_line(self, instead: object) -> str:
        """Return the line that tells how to go on; empty if no checkpoint can be resumed from."""
        line = self._checkpointer.resume_line()
        return f"resumed as it is, it would stop again: {instead}" if line and instead else line

    def _close(self, *, abort: bool = False) -> None:
        try:
            self._checkpointer.close(math.inf if self._patience is None else self._patience.left)
        finally:
            self._bus.internal.release_thread(self._interrupt)
            self._close_bus(abort=abort)

    def _close_bus(self, *, abort: bool) -> None:
        try:
            if self._opened:
                self._opened = False
                self._bus.close(abort=abort)
        finally:
            self.on_close.close()

    def _interrupt(self) -> None:
        """Raise if the training thread must not wait for room in a full lane; the bus calls this before each wait."""
        if self._patience is None:
            self.state.check_cancelled()
        elif not self._patience.left:
            raise LaneFullError(
                f"the run ends after an exception and waits at most {self._bus.abort_timeout:g} s for its lanes"
            )

    def _patience_now(self) -> Deadline:
        return self._patience or self._ending or Deadline(self._bus.drain_timeout)

    def _announce(self, event: type[Event], **payload: Any) -> None:
        """Publish an event between iterations, and advance the version if a handler may have changed the state."""
        self._run.publish(event, **payload)
        self.state.note_change(self._bus.internal.may_change_state(event))

    def _begin_stage(self) -> None:
        """Before the first stage of a training that does not resume, move the files of an earlier run aside."""
        run, state = self._run, self.state
        moves, self._looks_aside = self._looks_aside and self._host.facts.clears_folder and state.trains, False
        if not moves or state.resumed or state.counters.iter or state.counters.epoch or run.rank or run.work_dir is None:
            return
        if (aside := move_aside(run.work_dir, self._bus.hooks)) is not None:
            log.warning(
                "this folder has an earlier run, and this training does not resume it; its files were moved",
                id="earlier-run-moved",
                to=str(aside),
            )

    def _number_name(self) -> None:
        """Tell a run without a name and a work dir from the other open ones, for dashboards and streams."""
        run = self._run
        taken = {other.name for other in open_runs}
        if run.work_dir is None and run.name == DEFAULT_NAME and run.name in taken:
            run.name = next(name for number in count(2) if (name := f"{DEFAULT_NAME}-{number}") not in taken)
            self.state.counters.rename(run.name)
