"""``HeartbeatHook``: tell NVRx's ``ft_launcher`` that a rank makes progress, so that it restarts one that hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from types import NoneType
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from trainbus.eventloop import ConfigurationError, Hook, Priority, check_options, events, get_logger, mount
from trainbus.eventloop.checkpoint import steps_awaited
from trainbus.eventloop.errors import cannot_import
from trainbus.eventloop.registry import register
from trainbus.eventloop.seams import Seam
from trainbus.eventloop.training import Mailbox
from trainbus.eventloop.user_errors import contextmanager
from trainbus.eventloop.world import is_joined
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.options import added_late

_SOCKET: Final = "FT_RANK_MONITOR_IPC_SOCKET"
"""The variable by which ``ft_launcher`` names its monitor (nvidia_resiliency_ext/fault_tolerance/data.py, seen in 0.4.1)."""
INTERVAL: Final = Seam(1.0)
"""Seconds between two looks at the training, and so the shortest time between two heartbeats."""
_PATIENCE: Final = 5.0
"""Seconds that the end of a run waits for the thread, which may wait for a monitor that hangs."""
_SETUP, _STEP, _SAVING = "setup", "step", "checkpointing"  # as in NVRx's callbacks for Lightning
_SAVE: Final = "save"

Seconds = Annotated[float, Meta(gt=0, le=threading.TIMEOUT_MAX, description="a number of seconds above 0")]

log = get_logger()


@register
class HeartbeatHook(CopiedAnew, Hook):
    """Tell the monitor of NVRx's ``ft_launcher`` that this rank makes progress; the launcher restarts ranks that hang.

    - A thread looks once a second whether the training has come to another mount point (an iteration of a training, validation
      or test has ended, a state was copied for a checkpoint, ...). Then it sends a heartbeat. A training that hangs comes to no
      mount point, so that its heartbeats end. The training thread itself sends nothing.
    - While training waits for a save (``busy="wait"``, or the end of the run), heartbeats go on as long as the writer makes
      progress. So do those of other ranks that wait for this rank in the meantime, and those of a paused run.
    - The first heartbeat comes after the first iteration of the run. Until then the launcher's limit for the first one holds.
    - If the launcher's configuration has limits for the sections ``setup`` (until the end of the first iteration), ``step``, or
      ``checkpointing`` (waiting for a save), the hook opens these, and begins them anew with each heartbeat.

    Monitoring ends with the run. In a process that ``ft_launcher`` did not start, the hook says so once and does nothing.

    Args:
        save_timeout: seconds that one step of a save may take (writing 16 MB, syncing the file, uploading a part) while
            training waits for it. After that, heartbeats end until the next step.
        calculate_timeouts: have NVRx calculate its limits from what it has measured, after each epoch of a training that was
            resumed. Checkpoints keep them. All ranks must have the hook.

    Raises:
        ConfigurationError: later: NVRx is not installed; its monitor is not reached; the hook was added during a run; or
            ``calculate_timeouts`` needs a process group and there is none.
    """

    priority = Priority.HIGHEST
    observes = True
    of_run: ClassVar = {"_thread": NoneType}

    @check_options
    def __init__(self, *, save_timeout: Seconds = 600.0, calculate_timeouts: bool = False) -> None:
        self.save_timeout = save_timeout
        self.calculate_timeouts = calculate_timeouts
        self.moves = 0
        """The mount points that the run has come to, from the end of its first iteration on."""
        self.paused = False
        """True while the run is paused."""
        self._thread: _Heartbeats | None = None
        self._timeouts: dict[str, Any] = {}
        self._resumed = False

    def in_check(self) -> None:
        return None  # its launcher would take the check for the training

    def unused(self) -> tuple[str, ...]:
        return () if self.calculate_timeouts else ("calculate",)

    def before_run(self, event: events.BeforeRun) -> None:
        self.moves, self.paused = 0, False
        if _SOCKET not in os.environ:
            log.info("ft_launcher did not start this process, so no heartbeats are sent", hook=self.label)
            return
        if self.calculate_timeouts and not is_joined():
            raise ConfigurationError(
                f"{self.label}(calculate_timeouts=True) compares the ranks: call torch.distributed.init_process_group() before "
                "the run, also for a single process"
            )
        self._thread = thread = _Heartbeats(self, event.run)
        event.run.defer(self._end)
        if self.calculate_timeouts:
            thread.load(self._timeouts)
        thread.start()

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    @mount(events.AfterIter)
    def move(self, event: events.AfterIter) -> None:
        self.moves += 1

    @mount(
        events.BeforeEpoch,
        events.AfterEpoch,
        events.AfterVal,
        events.AfterTest,
        events.BeforeSaveCheckpoint,
        events.CheckpointStaged,
        events.AfterTrain,
        events.AfterRun,
    )
    def move_on(self, event: events.RunEvent) -> None:
        self.moves += self.moves > 0

    @mount(events.RunPaused, events.RunResumed)
    def pause(self, event: events.RunPaused | events.RunResumed) -> None:
        self.paused = isinstance(event, events.RunPaused)
        self.moves += 1

    @mount(events.BeforeTrain, events.BeforeTrainEpoch, events.AfterTrainEpoch)
    def check_begun(self, event: events.RunEvent) -> None:
        if self._thread is None and _SOCKET in os.environ:
            raise added_late(self.label)

    def before_train(self, event: events.BeforeTrain) -> None:
        self._resumed = event.progress.iter > 0

    @mount(events.AfterTrainEpoch, events.AfterTrain)
    def calculate(self, event: events.AfterTrainEpoch | events.AfterTrain) -> None:
        # The setup of a run that did not resume is shorter than that of the next run, which loads a checkpoint. All ranks have
        # resumed or none, as it must be for a collective.
        if self._thread is not None and self._resumed:
            self._timeouts = self._thread.calculate()

    def state_dict(self) -> dict[str, Any]:
        return {"timeouts": self._timeouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._timeouts = dict(state["timeouts"])
        if self._thread is not None and self.calculate_timeouts:
            self._thread.load(self._timeouts)


class _Heartbeats(threading.Thread):
    """Sends the heartbeats of a run to the monitor, through NVRx's client."""

    def __init__(self, hook: HeartbeatHook, run: events.RunView) -> None:
        super().__init__(name="trainbus-heartbeat", daemon=True)
        try:
            nvrx = import_module("nvidia_resiliency_ext.fault_tolerance")
        except ImportError as error:
            what = f"{hook.label}: ft_launcher started this process, and the hook"
            raise cannot_import(
                what, "NVRx", "nvrx", error, "nvidia_resiliency_ext", "nvidia_resiliency_ext.fault_tolerance"
            ) from error
        self._hook = hook
        self._training = threading.get_ident()
        self._ended = threading.Event()
        self._using = threading.Lock()
        """Held while the client is used: it has one connection."""
        self._mailbox = Mailbox("heartbeats") if run.world_size > 1 else None
        self._rank = run.rank
        self._moves = 0
        self._steps: int | None = None
        self._stepped_at = 0.0
        self._told: list[Any] = []
        self._error: type[Exception] = nvrx.RankMonitorClientError
        self._sent = self._failed = False
        self._client = nvrx.RankMonitorClient()
        try:
            self._client.init_workload_monitoring()
        except (self._error, OSError, RuntimeError) as error:  # the last one: it has no rank
            raise ConfigurationError(
                f"{hook.label} does not reach the monitor of ft_launcher at {os.environ[_SOCKET]} ({type(error).__name__}: "
                f"{error}): start this process by ft_launcher, or without the variable {_SOCKET}"
            ) from error
        beats, limits = self._client.hb_timeouts, self._client.section_timeouts
        self._beats = not (beats.initial is beats.subsequent is None)
        self._sections = {*limits.section}
        self._has_sections = bool(limits.section) or limits.out_of_section is not None
        if not (self._beats or self._has_sections):
            log.warning(
                "the configuration of ft_launcher has no limits, so it does not notice when this rank hangs",
                id="heartbeat-without-limits",
            )
        if _SETUP in self._sections:
            self._client.start_section(_SETUP)
            self._sent = True

    def run(self) -> None:
        while not self._ended.wait(INTERVAL.value):
            if (section := self._look()) and not self._send(section):
                return

    def _look(self) -> str:
        """Return the section that the training is in, if it has made progress since the last look; else an empty string."""
        moves, before = self._hook.moves, self._moves
        self._moves = moves
        if (steps := steps_awaited(self._training)) is not None:
            return _SAVING if self._is_writing(steps) else ""
        self._steps = None
        if moves != before or self._hook.paused:
            return _STEP
        return _SAVING if moves and self._another_saves() else ""

    def _is_writing(self, steps: int) -> bool:
        now = time.monotonic()
        if steps != self._steps:
            self._steps, self._stepped_at = steps, now
        if now - self._stepped_at > self._hook.save_timeout:
            return False
        if self._mailbox is not None:
            with suppress(RuntimeError, OSError):  # the process with the store has ended
                self._mailbox.put(_SAVE, [self._rank, now])
        return True

    def _another_saves(self) -> bool:
        """Return True if another rank has told since the last call that it waits for a save; this one may wait for that rank.

        A rank that trains does not count: if ranks are independent, it would hide that this one hangs.
        """
        if self._mailbox is None:
            return False
        told, before = [], self._told
        with suppress(RuntimeError, OSError):
            if self._mailbox.has(_SAVE):
                (told,) = self._mailbox.get(list, _SAVE)
        self._told = told
        return told != before

    def _send(self, section: str) -> bool:
        """Send a heartbeat, and begin the section anew; return False if the monitor does not answer."""
        with self._asking():
            if self._beats:
                self._client.send_heartbeat()
            if self._has_sections:
                self._client.end_all_sections()  # which also begins the time outside of sections anew
                if section in self._sections:
                    self._client.start_section(section)
            self._sent = True
        return not self._failed

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Hold the connection. If the monitor does not answer, log it; training goes on."""
        try:
            with self._using:
                yield
        except (self._error, OSError) as error:
            self._failed = True
            log.warning(
                "the monitor of ft_launcher does not answer, so heartbeats end", id="heartbeats-ended", error=str(error)
            )

    def calculate(self) -> dict[str, Any]:
        """Have NVRx calculate and set its limits, where it has measured enough; return its state. A collective."""
        with self._asking():
            if self._beats:
                self._client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
            for section in sorted(self._sections & {_SETUP, _STEP, _SAVING}):
                self._client.calculate_and_set_section_timeouts([section], calc_out_of_section=False, skip_if_not_ready=True)
        return dict(self._client.state_dict())

    def load(self, state: Mapping[str, Any]) -> None:
        """Set limits that an earlier run has calculated."""
        timeouts = dict(state.get(self._client.CURRENT_TIMEOUTS_STATE_KEY, {}))
        sections = timeouts.get("section", {}).get("section", {})
        if sections and {*sections} != self._sections:
            del timeouts["section"]  # the monitor would fail at a section without a limit, and watch no more
            log.warning(
                "the limits of the checkpoint are for other sections than those of ft_launcher's configuration, which holds",
                id="heartbeat-sections-differ",
                checkpoint=sorted(sections),
                configuration=sorted(self._sections),
            )
        with self._asking():
            self._client.load_state_dict({self._client.CURRENT_TIMEOUTS_STATE_KEY: timeouts})

    def close(self) -> None:
        """End the monitoring of this process."""
        self._ended.set()
        if self.ident is not None:
            self.join(_PATIENCE)
        if self.is_alive():
            log.warning("the monitor of ft_launcher does not answer", id="heartbeat-monitor-slow", seconds=_PATIENCE)
            return
        # A monitor that hears nothing between two connections takes the second one for a restart that failed.
        if self._failed or not (self._sent or self._send("")):
            return
        with self._asking():
            if self._has_sections:
                self._client.end_all_sections()
            self._client.shutdown_workload_monitoring()
