"""``AlertHook``: post to a webhook when a run needs a person, and when it ends."""

from __future__ import annotations

import html
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from time import time
from types import NoneType
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

import msgspec
import torch

from trainbus.eventloop import ConfigurationError, Hook, Priority, check_options, events, mount
from trainbus.eventloop.registry import register
from trainbus.eventloop.seams import CLOCK
from trainbus.eventloop.spelling import did_you_mean
from trainbus.eventloop.training import failed_first
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.options import Name, one_or_more
from trainbus.observe.costs import Costs, LaneCosts
from trainbus.observe.ranks import slow_at
from trainbus.observe.run_folder import encode_line
from trainbus.observe.states import RunStatus, after_error
from trainbus.observe.webhook import Webhook, address

Occasion = Literal["nan", "stall", "slow_rank", "full_lane", "finished", "preempted", "failed"]
OCCASIONS: Final = get_args(Occasion)

Seconds = Annotated[float, msgspec.Meta(gt=0, le=threading.TIMEOUT_MAX, description="a number of seconds above 0")]

_ENDS: Final = ("finished", "preempted", "failed")  # sent always
_LOOK: Final = 1.0  # longest time in seconds between two looks at a training that may stall
_ABORTED: Final = 1.0  # seconds to wait after an exception: less than bus.abort_timeout, which runs
_WAITS: Final = 0.1  # share of the time from which on waiting for a lane is worth an alert
_LONGEST: Final = 2_000  # characters of a message


class Alert(msgspec.Struct, kw_only=True, frozen=True):
    """The JSON object that is posted. Slack, Mattermost and others show ``text`` and leave out the rest.

    Counts are those of finished epochs and iterations; a loss of iteration 41 has ``iter`` 41.
    """

    text: str
    """The name of the run and the message, with ``&``, ``<`` and ``>`` escaped, as Slack wants it."""
    kind: Occasion
    run: str
    """The name of the run."""
    message: str
    epoch: int
    iter: int
    metrics: dict[str, Any]
    """The last scalars of the training and of a validation, with their stage. NaN and infinities are texts."""
    rank: int
    host: str
    time: float
    """Seconds since 1970."""
    held_back: int
    """The number of alerts of this kind that ``repeat_after`` held back since the one before."""


@register
class AlertHook(CopiedAnew, Hook):
    """Post to a webhook when a run needs a person, and when it ends.

    - ``nan``: a training or validation loss is NaN or infinite.
    - ``stall``: no iteration of a training, validation or test has ended for ``stall_after`` seconds. A pause is no stall.
    - ``slow_rank``: the other ranks wait for one, for a tenth of an iteration, in three comparisons in a row.
    - ``full_lane``: an offloaded handler dropped events, or training waited for it a tenth of the time between two looks.
      ``full="latest"`` drops by design and is left out.
    - ``finished``: the run has ended by itself or by ``run.stop()``; ``preempted``: with an exit status, as ``PreemptionHook``
      does. ``failed``: an exception ended it, other than Ctrl-C. Of several processes, the one that failed first tells it;
      rank 0 tells the rest.

    Each alert is one POST of an :class:`Alert` as JSON, by a thread of its own. A webhook that fails or hangs costs the
    training nothing, is logged once, and is tried again; see :class:`trainbus.observe.webhook.Webhook`. At its end the run
    waits for the last alert, at most ``end_timeout`` seconds. After an exception it waits for a second, and the program's
    exit for the rest.

    Args:
        to: URL of the webhook, or ``"$NAME"`` for that in an environment variable. Logs and records show only its host.
        when: what to tell, one or several; by default all.
        stall_after: seconds without an iteration that are a stall.
        repeat_after: seconds in which an alert of the same kind is held back. The end of a run is always told.
        end_timeout: seconds that the end of a run waits for the webhook.

    Raises:
        ConfigurationError: ``to`` is no URL of http or https, its variable is not set, or ``when`` has an unknown name.
    """

    priority = Priority.LOWEST
    observes = True
    of_run: ClassVar = {
        "_webhook": NoneType,
        **dict.fromkeys(("_metrics", "_sent", "_lanes"), dict),
        "_held_back": Counter,
        "_lock": threading.Lock,
        "_moved": int,
        "_paused": bool,
        "_how": NoneType,
        "_progress": events.Progress,
    }

    @check_options
    def __init__(
        self,
        to: Name,
        when: str | Iterable[str] = OCCASIONS,
        *,
        stall_after: Seconds = 600.0,
        repeat_after: Seconds = 600.0,
        end_timeout: Seconds = 10.0,
    ) -> None:
        self._url = address("to", to)
        self.when = one_or_more("when", when, f"one or several of {', '.join(OCCASIONS)}")
        for name in self.when:
            if name not in OCCASIONS:
                raise ConfigurationError(f"when={name!r}{did_you_mean(name, OCCASIONS)}; there are {', '.join(OCCASIONS)}")
        self.stall_after = stall_after
        self.repeat_after = repeat_after
        self.end_timeout = end_timeout
        self.timing = not {"slow_rank", "full_lane"}.isdisjoint(self.when)
        self._webhook: Webhook | None = None
        self._metrics: dict[str, Mapping[str, float]] = {}
        self._sent: dict[str, float] = {}
        self._lanes: dict[str, LaneCosts] = {}
        self._wall = 0.0
        self._held_back: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._moved = 0
        self._paused = False
        self._progress = events.Progress()
        self._iterations = 0
        self._name, self._rank = "run", 0
        self._how: tuple[Occasion, str] | None = None  # how the run ends, if that is to be told

    def in_check(self) -> None:
        return None  # it would alert somebody to a training that is none

    def unused(self) -> Collection[str]:
        return () if "stall" in self.when else ("move", "pause")

    # ------------------------------------------------------------------------------------- inline: on the training thread

    def before_run(self, event: events.BeforeRun) -> None:
        run = event.run
        self._name, self._rank = run.name, run.rank
        self._metrics, self._sent, self._lanes, self._wall = {}, {}, {}, 0.0
        self._held_back.clear()
        self._moved, self._paused, self._progress, self._iterations = 0, False, event.progress, event.progress.iter
        self._webhook = self._webhook or Webhook(self._url)
        if "stall" in self.when and not run.rank:
            watch = _Watch(self._moves, self.stall_after, self._stalled)
            run.defer(watch.ended.set)
            watch.start()

    @mount(events.AfterIter, events.BeforeTrain, events.BeforeVal, events.BeforeTest, ranks="rank0")
    def move(self, event: events.RunEvent) -> None:
        self._moved += 1
        self._progress = event.progress
        self._iterations = event.progress.iter + isinstance(event, events.AfterTrainIter)  # which progress does not count yet

    @mount(events.RunPaused, events.RunResumed, ranks="rank0")
    def pause(self, event: events.RunPaused | events.RunResumed) -> None:
        self._paused = isinstance(event, events.RunPaused)
        self._moved += 1

    @mount(events.AfterRun, events.OnException, priority=Priority.BELOW_NORMAL)
    def end(self, event: events.AfterRun | events.OnException) -> None:
        """Note how the run ends, which only the run knows. Rank 0 tells it behind all that waits in the lane."""
        self._how = _ended(event) if isinstance(event, events.AfterRun) else _failed(event)
        if event.run.rank and isinstance(event, events.OnException):
            self._tell_end(event, wait=_ABORTED)

    def _tell_end(self, event: events.AfterRun | events.OnException, wait: float) -> None:
        if self._how is not None:
            self._alert(*self._how, event.progress.epoch, event.progress.iter)
        if self._webhook is not None:
            self._webhook.post_rest(self.end_timeout, wait)

    # -------------------------------------------------------------------------------------- on the thread of the lane

    # One lane, so that the end comes last. Few wake-ups, because each costs the training thread time.
    @mount(
        events.AfterTrainIter,
        events.AfterValEpoch,
        events.CostsMeasured,
        events.RanksMeasured,
        events.AfterRun,
        events.OnException,
        offload="thread",
        batch=1024,
        linger=0.25,
        on_error="log",
        ranks="rank0",
    )
    def check_events(self, batch: list[events.Event]) -> None:
        for event in batch:
            match event:
                case events.AfterTrainIter(progress=now, outputs=outputs):
                    at = now.epoch + 1, now.iter + 1  # progress does not count this iteration yet
                    self._check("train", outputs, "at iteration {1:,} (epoch {0:,})", at)
                case events.AfterValEpoch(progress=now, metrics=metrics):
                    self._check("val", metrics, "in the validation after iteration {1:,} (epoch {0:,})", (now.epoch, now.iter))
                case events.CostsMeasured(progress=now, costs=costs):
                    for message in self._full_lanes(costs):
                        self._alert("full_lane", message, now.epoch, now.iter)
                case events.RanksMeasured(progress=now, ranks=ranks):
                    if (slow := ranks.straggler) is not None:
                        message = f"the others wait for rank {slow.rank} ({slow.host}): {slow_at(slow)}"
                        self._alert("slow_rank", message, now.epoch, now.iter)
                case events.AfterRun():
                    self._tell_end(event, wait=self.end_timeout)
                case events.OnException():
                    self._tell_end(event, wait=_ABORTED)

    def _check(self, stage: str, values: Mapping[str, Any], where: str, at: tuple[int, int]) -> None:
        numbers = {f"{stage}/{name}": float(value) for name, value in values.items() if _is_number(value)}
        self._metrics[stage] = numbers
        bad = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value) and "loss" in name.lower()]
        if bad:
            self._alert("nan", f"{', '.join(bad)} {where.format(*at)}", *at)

    def _full_lanes(self, costs: Costs) -> list[str]:
        before, wall, found = self._lanes, costs.wall - self._wall, []
        self._lanes, self._wall = {lane.name: lane for lane in costs.lanes}, costs.wall
        for lane in costs.lanes:
            old = before.get(lane.name)
            dropped = lane.dropped - (old.dropped if old else 0)
            waited = lane.waited - (old.waited if old else 0.0)
            if dropped > 0 and lane.full != "latest":
                found.append(f"the full lane of {lane.name} dropped {dropped:,} events, {lane.dropped:,} in all")
            elif wall > 0 and waited > _WAITS * wall:
                found.append(f"training waited {waited:.3g} s of {wall:.3g} s for the full lane of {lane.name}")
        return found

    # ------------------------------------------------------------------------------------------------ from any thread

    def _alert(self, kind: Occasion, message: str, epoch: int, iteration: int) -> None:
        """Post an alert, unless it is not wanted, or one of its kind was posted a short time ago."""
        webhook = self._webhook
        if kind not in self.when or webhook is None:
            return
        with self._lock:
            now = CLOCK.value()
            if kind not in _ENDS and now - self._sent.get(kind, -math.inf) < self.repeat_after:
                self._held_back[kind] += 1
                return
            self._sent[kind] = now
            held_back = self._held_back.pop(kind, 0)
        message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…"
        alert = Alert(
            text=html.escape(f"{self._name}: {message}", quote=False),
            kind=kind,
            run=self._name,
            message=message,
            epoch=epoch,
            iter=iteration,
            metrics={name: value for own in self._metrics.values() for name, value in own.items()},
            rank=self._rank,
            host=socket.gethostname(),
            time=time(),
            held_back=held_back,
        )
        webhook.post(encode_line(msgspec.to_builtins(alert)))

    def _moves(self) -> int | None:
        return None if self._paused else self._moved or None

    def _stalled(self, seconds: float) -> None:
        at = self._progress
        where = f"in epoch {at.epoch + 1:,}" if at.stage == "train" else f"in a {at.stage} stage"
        message = f"no iteration for {seconds:,.3g} s, {where} after {_count(self._iterations, 'iteration')}"
        self._alert("stall", message, at.epoch, self._iterations)


class _Watch(threading.Thread):
    """Call ``tell`` with the seconds once ``moves`` has returned the same for ``after`` seconds, for each stall once.

    ``moves`` returns None while no move is expected.
    """

    def __init__(self, moves: Callable[[], int | None], after: float, tell: Callable[[float], None]) -> None:
        super().__init__(name="trainbus-alerts", daemon=True)
        self.ended = threading.Event()
        self._moves, self._after, self._tell = moves, after, tell

    def run(self) -> None:
        last, since, told = self._moves(), CLOCK.value(), False
        while not self.ended.wait(min(_LOOK, self._after / 4)):
            moves, now = self._moves(), CLOCK.value()
            if moves != last or moves is None:
                last, since, told = moves, now, False
            elif not told and now - since >= self._after:
                told = True
                self._tell(now - since)


def _ended(event: events.AfterRun) -> tuple[Occasion, str]:
    run, progress = event.run, event.progress
    how = "was preempted" if run.exit_code else "was stopped" if event.stopped else "finished"
    why = f": {event.reason}" if event.reason else ""
    message = f"the run {how} after {_count(progress.epoch, 'epoch')}, {_count(progress.iter, 'iteration')}{why}"
    return "preempted" if run.exit_code else "finished", message


def _failed(event: events.OnException) -> tuple[Occasion, str] | None:
    if after_error(event.exception) is not RunStatus.FAILED or not failed_first(event.exception):
        return None
    where = f" on rank {event.run.rank}" if event.run.world_size > 1 else ""
    return "failed", f"the run failed{where} after {_count(event.progress.iter, 'iteration')}: {event.error}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex())


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
