"""torch's profiler as a hook: one session at a time, and an error in torch does not end the run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, supported_activities, tensorboard_trace_handler
from torch.profiler import schedule as profiler_schedule

from trainbus.eventloop import ConfigurationError, Hook, Priority, check_options, get_logger
from trainbus.eventloop.bus import mark_ranges
from trainbus.eventloop.events import AfterTrainEpoch, AfterTrainIter, BeforeTrain, RunView
from trainbus.eventloop.registry import register
from trainbus.eventloop.user_errors import contextmanager
from trainbus.hooks.options import PositiveInt

log = get_logger()

TraceHandler = Callable[[profile], object]


@contextmanager
def survived(owner: str) -> Iterator[None]:
    """Log an error of torch's profiler instead of raising it. ``owner`` is the label of the hook."""
    try:
        yield
    except Exception:
        log.exception("torch's profiler failed; training continues without this profile", id="profiler-failed", hook=owner)


def in_work_dir(path: str | Path, run: RunView) -> Path:
    """Return ``path``, relative to the work dir if the run has one."""
    return (run.work_dir or Path()) / Path(path).expanduser()


class ProfilerSession:
    """One use of ``torch.profiler.profile``. A second session at the same time is an error: torch would lose data of the first.

    An error in torch is logged and ends the session. An error in the user's function (``on_trace_ready``) ends the run.
    """

    _active: ClassVar[str | None] = None

    def __init__(
        self, owner: str, on_trace_ready: TraceHandler | None = None, json_path: Path | None = None, **options: Any
    ) -> None:
        self._owner = owner
        self._json_path = json_path
        self._failure: BaseException | None = None
        self._running = False
        self._profiler = profile(on_trace_ready=on_trace_ready and partial(self._hand_over, on_trace_ready), **options)

    def start(self) -> None:
        if ProfilerSession._active is not None:
            both = f"{self._owner} cannot profile while {ProfilerSession._active} is"
            raise ConfigurationError(f"{both}: torch runs one profiler at a time; remove one of them")
        ProfilerSession._active = self._owner
        mark_ranges(True)
        self._run(self._profiler.__enter__)

    def step(self) -> None:
        """Step the profiler at the end of an iteration; a schedule may produce a trace here."""
        if self._running:
            self._run(self._profiler.step)
            self._raise_failure()

    def close(self, *, write: bool = True) -> None:
        """Stop the profiler, and write its last trace to the file unless ``write`` is False. A second call does nothing."""
        if not self._running:
            return
        self._running = False
        ProfilerSession._active = None
        mark_ranges(False)
        with survived(self._owner):
            self._profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch does not annotate it
            if write and self._json_path is not None and self._profiler.profiler is None:
                log.warning(
                    "the profiler recorded nothing; no trace is written",
                    id="profile-empty",
                    hook=self._owner,
                    path=str(self._json_path),
                )
            elif write and self._json_path is not None:
                self._json_path.parent.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(self._json_path))
                log.info("profile written", path=str(self._json_path))
        del self._profiler  # it holds the profile
        self._raise_failure()

    def _run(self, do: Callable[[], object]) -> None:
        """Call the profiler. A failure ends the session, so that another one can begin."""
        # First False: after Ctrl-C between two traces, stopping again would crash the process.
        self._running = False
        try:
            with survived(self._owner), warnings.catch_warnings():
                # The warning is about intended behaviour: each cycle of a schedule has its own trace.
                warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
                do()
                self._running = True
        finally:
            if not self._running:
                ProfilerSession._active = None
                mark_ranges(False)

    def _hand_over(self, on_trace_ready: TraceHandler, profiler: profile) -> None:
        try:
            on_trace_ready(profiler)
        except BaseException as error:  # noqa: BLE001 - raised when torch has finished its work
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


@register
class ProfilerHook(Hook):
    """Profile the first ``profile_times`` epochs or iterations after training begins or is resumed.

    Each call of a handler is a range in the profile, with its name in ``bus.costs()``.

    Profile a few iterations: they are much slower, and the profile stays in memory until it is closed. An error in torch's
    profiler is logged and ends the profile, not the run. An error in your own ``on_trace_ready`` ends the run.

    Args:
        by_epoch: count epochs; False counts iterations.
        profile_times: number of epochs or iterations.
        activities: ``"cpu"``, ``"cuda"``, ``"xpu"``, or members of ``torch.profiler.ProfilerActivity``; by default all that
            torch can profile on this machine.
        activity_with_cpu: MMEngine's option to profile the CPU, in place of ``activities`` (default True).
        activity_with_cuda: MMEngine's option to profile CUDA, in place of ``activities`` (default False).
        schedule: arguments of ``torch.profiler.schedule`` in iterations (``wait``, ``warmup``, ``active``, ``repeat``,
            ``skip_first``), or its result; None records every iteration.
        on_trace_ready: a function that takes the profiler. ``{"type": "log_trace"}`` with the arguments of
            ``key_averages().table`` (``sort_by``, ``row_limit``) logs a table; if torch cannot make it, the trace goes to
            ``profile-step{n}.json`` in the work dir. ``{"type": "tb_trace"}`` with the arguments of
            ``tensorboard_trace_handler`` (``dir_name`` in the work dir, ``worker_name``, ``use_gzip``) writes files for
            TensorBoard's profiler plugin. None logs a table, unless there is a ``json_trace_path``.
        record_shapes: record the shapes of operators' inputs.
        profile_memory: record the memory that operators allocate.
        with_stack: record the source lines of operators.
        with_flops: estimate the operations of matrix products and convolutions.
        json_trace_path: file for the last trace (``.json`` or ``.json.gz``), for chrome://tracing or Perfetto; relative to the
            work dir if the run has one.

    Raises:
        ConfigurationError: later: ``by_epoch`` in iteration-based training, or another hook is profiling.
    """

    priority = Priority.VERY_LOW
    observes = True
    ranks = "rank0"

    @check_options
    def __init__(
        self,
        *,
        by_epoch: bool = True,
        profile_times: PositiveInt = 1,
        activities: str | Iterable[str | ProfilerActivity] | None = None,
        activity_with_cpu: bool | None = None,
        activity_with_cuda: bool | None = None,
        schedule: Mapping[str, int] | Callable[[int], Any] | None = None,
        on_trace_ready: TraceHandler | Mapping[str, Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        json_trace_path: str | Path | None = None,
    ) -> None:
        _check_trace(on_trace_ready, json_trace_path)
        self.by_epoch = by_epoch
        self.profile_times = profile_times
        self._trace = on_trace_ready
        self._json = json_trace_path
        self._options: dict[str, Any] = {
            "activities": _activities(activities, activity_with_cpu, activity_with_cuda),
            "schedule": _schedule(schedule),
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        self._session: ProfilerSession | None = None  # also None if the hook is added during a training
        self._count = 0

    def in_check(self) -> None:
        return None  # it may write anywhere

    def before_train(self, event: BeforeTrain) -> None:
        if self.by_epoch and event.progress.max_iters is not None:
            advice = "which is one long epoch; give by_epoch=False, profile_times=<iterations>"
            raise ConfigurationError(f"{self.label}(by_epoch=True) would profile all of an iteration-based training, {advice}")
        self._count = 0
        json_path = None if self._json is None else in_work_dir(self._json, event.run)
        self._session = session = ProfilerSession(self.label, self._handler(event.run), json_path, **self._options)
        event.run.defer(session.close)
        session.start()

    def after_train_iter(self, event: AfterTrainIter) -> None:
        if self._session is not None:
            self._session.step()
        self._close_if_done(counts=not self.by_epoch)

    def after_train_epoch(self, event: AfterTrainEpoch) -> None:
        self._close_if_done(counts=self.by_epoch)

    def _close_if_done(self, *, counts: bool) -> None:
        self._count += counts
        if self._session is not None and self._count >= self.profile_times:
            self._session.close()

    def _handler(self, run: RunView) -> TraceHandler | None:
        """Return the function for traces, or None if only the file is wanted."""
        if callable(self._trace) or (self._trace is None and self._json is not None):
            return self._trace
        options = dict(self._trace or {"type": "log_trace"})
        if options.pop("type") == "log_trace":
            return self._survived(partial(self._log_table, run, options))
        directory = in_work_dir(options.pop("dir_name", "tf_tracing_logs"), run)
        log.info("writing traces for TensorBoard", directory=str(directory))
        write: TraceHandler = tensorboard_trace_handler(str(directory), **options)
        return self._survived(write)

    def _survived(self, write: TraceHandler) -> TraceHandler:
        def survive(profiler: profile) -> None:
            with survived(self.label):
                write(profiler)

        return survive

    def _log_table(self, run: RunView, options: dict[str, Any], profiler: profile) -> None:
        try:
            table = profiler.key_averages().table(**options)
        except Exception:  # torch 2.13 makes names that are not UTF-8 with with_stack and profile_memory
            path = in_work_dir(f"profile-step{profiler.step_num}.json", run)
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))  # this works, because it does not decode the names
            log.exception(
                "torch cannot make a table of the profile; the trace is in a file",
                id="profile-without-table",
                hook=self.label,
                path=str(path),
            )
        else:
            log.info("profile\n" + table)


def _check_trace(trace: TraceHandler | Mapping[str, Any] | None, json_path: str | Path | None) -> None:
    if json_path is not None and not str(json_path).endswith((".json", ".json.gz")):
        raise ConfigurationError(f"json_trace_path={json_path!r}: give the name of a file that ends in .json or .json.gz")
    if trace is None or callable(trace):
        return
    kinds: dict[Any, Callable[..., Any]] = {"log_trace": EventList.table, "tb_trace": tensorboard_trace_handler}
    kind, column = trace.get("type"), trace.get("sort_by")
    if kind not in kinds:
        advice = 'give a function that takes the profiler, {"type": "log_trace"} or {"type": "tb_trace"}'
        raise ConfigurationError(f"on_trace_ready={trace!r}: {advice}")
    known = inspect.signature(kinds[kind]).parameters.keys() - {"self"}
    if unknown := trace.keys() - known - {"type"}:
        lacking = ", ".join(map(repr, sorted(unknown)))
        raise ConfigurationError(f"on_trace_ready: {kind} has no option {lacking}; it has {', '.join(sorted(known))}")
    if column is not None and not hasattr(FunctionEventAvg(), str(column).replace("cuda", "device")):
        raise ConfigurationError(f'on_trace_ready: sort_by={column!r} is not a column; give "self_cpu_time_total", for example')
    if kind == "tb_trace" and json_path is not None:
        advice = "remove json_trace_path; the file in dir_name also opens in chrome://tracing"
        raise ConfigurationError(f"json_trace_path={str(json_path)!r} with tb_trace: torch writes a trace only once; {advice}")


def _activities(
    given: str | Iterable[str | ProfilerActivity] | None, cpu: bool | None, cuda: bool | None
) -> list[ProfilerActivity] | None:
    if cpu is not None or cuda is not None:
        if given is not None:
            raise ConfigurationError("activities= is given with activity_with_cpu= or activity_with_cuda=; give one of them")
        given = [name for name, wanted in (("cpu", cpu is not False), ("cuda", cuda)) if wanted]
    if given is None:
        return None
    supported = supported_activities()  # type: ignore[no-untyped-call]  # torch does not annotate it
    names = {activity.name.lower(): activity for activity in supported}
    listed = [given] if isinstance(given, str) else given
    chosen = [names.get(one.lower()) if isinstance(one, str) else one for one in listed]
    if not chosen or not all(one in supported for one in chosen):
        there = ", ".join(map(repr, sorted(names)))
        raise ConfigurationError(f"activities={given!r}: give one or several that torch can profile on this machine: {there}")
    return [one for one in chosen if one is not None]


def _schedule(schedule: Mapping[str, int] | Callable[[int], Any] | None) -> Callable[[int], Any] | None:
    if schedule is None or callable(schedule):
        return schedule
    try:
        return profiler_schedule(**schedule)
    except (TypeError, AssertionError) as error:
        raise ConfigurationError(f"schedule={dict(schedule)!r}: {error or 'a count is out of range'}") from None
