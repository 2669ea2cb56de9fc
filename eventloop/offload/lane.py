"""One bounded FIFO queue between the publishers and the consumer of an offloaded subscription.

Locking. The way of an event into a lane with room is one ``deque.append``, which is documented to be thread-safe. Everything
else happens with the lock held. (With the lock, too, it would take more than twice as long.) So publishers on several threads
may find the same last slot free: each can then exceed the capacity by one event. The lock is re-entrant: a signal handler, or a
finalizer that the garbage collector calls, may publish while its thread holds it.

Counting. ``pending`` is derived from the queue and from what the consumer has taken and not counted. So the counts add up even
if Ctrl-C strikes in a publisher: an event is published if it is in the queue, and not otherwise.

Ending. A *closed* lane refuses events with an error: its bus is not open. A *retired* lane (its subscription was cancelled)
still takes events of publishes under way, because a cancel takes effect at the next publish.

Waking. A wake-up per event costs the publisher 10 µs and more, so the consumer stays *armed* after a drain and looks again
after ``linger``; only after an empty look does it disarm, look once more, and sleep. A publisher that finds the lane disarmed
after its append wakes it. A sleeping consumer looks again after ``LOOK`` all the same. So an event whose wake-up is missed (by
a Ctrl-C between the append and the wake-up, or without a GIL) is late and never lost. While the consumer of a large lane
lingers, the bound stands at half of the capacity: the publisher that comes there wakes the consumer, so that a long linger does
not fill the lane.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from enum import Enum
from functools import partial
from itertools import repeat
from operator import sub
from typing import Any, Final, Literal

from trainbus.eventloop.errors import LaneClosedError, LaneFullError
from trainbus.eventloop.locks import is_held, may_wait, new_lock
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload.drain import Deadline, DrainReport
from trainbus.eventloop.offload.meter import LaneMeter
from trainbus.eventloop.offload.snapshot import delayed
from trainbus.eventloop.seams import Seam

Full = Literal["block", "drop_old", "drop_new", "latest", "raise"]

PATIENCE: Final = Seam(10.0)
"""Seconds that a publisher waits for a slot without progress before it logs which handler it waits for."""

POLL: Final = Seam(0.2)
"""Seconds after which a waiting publisher or drain checks again, in case Ctrl-C swallowed a notification."""

LOOK: Final = Seam(1.0)
"""Seconds after which a sleeping consumer looks into the queue, in case it missed a wake-up."""

log = get_logger()

_WORTH_A_WAKE_UP: Final = 32  # events; with fewer, lingering would save nothing
_UNKNOWN: Final = 1.0  # seconds; a handler that finished no event for so long counts as slow
_NOT_OPEN = "the bus is not open: wrap the publishing code in `with bus:` (a Run or TrainLoop does it for you)"


# Ctrl-C cannot come between the acquisition of a lock in C and the block of its `with` statement (python/cpython#74174).
assert type(threading.RLock()).__module__ == "_thread"  # noqa: S101


class Mark:
    """All events that are in a lane at one moment, for a later event or a thread that waits until they are done.

    It has the methods of a copy from a device, so that a snapshot can wait for it on the consumer's side.
    """

    def __init__(self, lane: Lane, deadline: Deadline) -> None:
        self._lane = lane
        self._number = lane.came()
        self._deadline = deadline
        lane.wake()

    def query(self) -> bool:
        """Return True if they are done, or it is vain to wait any longer."""
        return self._lane.is_done(self._number) or not (self._deadline.left and self._lane.served)

    def synchronize(self, interrupt: Callable[[], object] = lambda: None) -> bool:
        """Wait until they are done; return False if the deadline, or the end of the lane's consumer, came first.

        ``interrupt`` is called now and then, and may raise an error.
        """
        while not self._lane.is_done(self._number):
            if not ((left := self._deadline.left) and self._lane.served):
                return False
            interrupt()
            # It looks again, too, as the deadline may have been moved nearer.
            self._lane.wait_for_change(self._number, min(POLL.value, left))
        return True


class Outcome(Enum):
    """What came of a publish that does not wait for room."""

    QUEUED = "queued"
    DROPPED = "dropped"


class Lane:
    """A bounded queue with a policy for when it is full. Publishers on any thread, one consumer.

    Args:
        label: name of the subscription, for errors.
        make_item: makes an item of an event, on the publisher's thread.
        capacity: number of events that may wait.
        full: what happens to an event when so many wait; see :class:`trainbus.eventloop.bus.HandlerOptions`.
        linger: seconds after which the consumer looks into the queue again.
    """

    chunk = 64
    """Items that the consumer takes at once for a handler that gets them one by one."""

    def __init__(
        self,
        label: str,
        make_item: Callable[[Any], Any],
        *,
        capacity: int = 1024,
        full: Full = "block",
        linger: float = 0.01,
    ) -> None:
        self.label = label  # of the subscription, for errors
        self.capacity = capacity  # most events in the queue
        self._half = (capacity + 1) // 2
        self.contextual = False
        """Whether items are queued as tuples of the publisher's context and the item (about 100 ns)."""
        self.number: Callable[[], int] | None = None
        """Numbers the events of all lanes with one consumer. Items are then tuples of context, item and number instead."""
        self.context = copy_context()  # of the subscriber, for handlers whose items come without one
        self.linger = linger  # seconds after which the consumer looks again
        self.full = full  # when it is full: wait, drop the oldest or the newest, keep only the newest, or raise
        self._make_item = make_item
        self.meter: LaneMeter | None = None
        """Records the events of the lane from the next one on."""
        self._queue: deque[Any] = deque()
        self._lock = new_lock()
        # Locks, all taken, of threads that wait for a change. A Condition would lose track of its own lock at a Ctrl-C in it:
        # its __enter__ is Python code (see python/cpython#74174).
        self._waiting: deque[threading.Lock] = deque()
        self._lingers = False  # until an item is taken, or the consumer was woken
        self._bound = 0  # the length of the queue up to which an event needs no lock
        self._held: list[Any] = []  # items that the consumer has taken and not counted, oldest first
        self._delivered = 0
        self._failed = 0
        self._dropped = 0
        self._refused = 0  # events that were dropped and never in the queue
        self._closed = True
        self._armed = True  # until a consumer attaches and disarms it, there is none to wake
        self._wake: Callable[[], object] | None = None
        self._owns: Callable[[], bool] = bool  # returns False
        self.max_bytes: int | None = None
        self._stuck_since: float | None = None
        self._warned = False
        self.warns = full in ("block", "drop_old", "drop_new")
        """Whether to warn when it is full; done once."""
        self._filled = ""  # what it was full of, until the warning is logged
        self._idle = (time.monotonic(), 0, 0)  # the moment when it was empty last
        self._retired = False
        self.given_up = False
        """True once the rest of the queue will not be delivered."""
        self._reason = _NOT_OPEN
        self._lost = False

    # ------------------------------------------------------------------------------------------- publisher's side

    def put(self, event: Any, behind: tuple[Mark, ...] = ()) -> None:
        """Queue the item of ``event`` as the policy allows. It takes the time of a copy, unless it must wait for a slot.

        The consumer delivers it when what the marks ``behind`` stand for is delivered.

        Raises:
            LaneClosedError: no consumer is attached, or the lane closed while waiting.
            LaneFullError: it is full and the policy is ``"raise"``, or waiting would be a deadlock.
        """
        # No item is made of an event that is dropped, except if another publisher takes the slot meanwhile.
        if len(self._queue) >= self._bound and not self._enter():
            return
        item = self._make_item(event)
        if behind:
            item = delayed(item, behind)
        if self.meter is not None:
            item = self.meter.record_queued(item, len(self._queue) + 1)
        self.put_as_is(item)

    def put_as_is(self, event: Any) -> None:
        """:meth:`put` for an event that needs no preparing: it is queued as it is."""
        item: Any
        if self.contextual:
            item = copy_context(), event
        elif self.number is None:
            item = event
        else:
            item = copy_context(), event, self.number()
        if len(self._queue) >= self._bound:
            self._enter(item)
            return
        self._queue.append(item)
        if not self._armed:
            self._wake_up()

    def _enter(self, *item: Any) -> bool:
        """Wait for a slot, or make one, as the policy allows; queue ``item`` there, if given. False if it was dropped."""
        return self._admit(self._full, "queue", self._drop_for_slot, partial(self._queue.extend, item))

    def _admit(self, lacks: Callable[[], str], option: str, drop: Callable[[], bool], accept: Callable[[], object]) -> bool:
        """Wait for room, or make it, as the policy allows, and call ``accept``; return False if the event was dropped.

        The functions are called with the lock held. ``lacks`` says what fills the lane, if anything; ``drop`` returns False if
        dropping queued events is not enough; ``option`` is the one that gives more room.
        """
        waited = False
        while True:
            with self._lock:
                hurry = self._lingers and self._used() >= self._half
                self._lingers = self._lingers and not hurry
                what, answer = lacks(), None
                if what or self._closed:
                    answer = self._make_room(what, option, drop, waited=waited)
                if answer is None:
                    accept()
                    answer = Outcome.QUEUED
                elif answer is Outcome.DROPPED:
                    self._refused += 1
                self._set_bound()
                asleep = not self._armed and bool(self._queue)
            if self._filled:
                self._warn()
            if isinstance(answer, Outcome):
                if asleep:
                    self._wake_up()
                elif hurry:
                    self.wake()
                return answer is Outcome.QUEUED
            waited = True
            if self.meter is None:
                self._sleep(answer)
            else:
                self.meter.record_wait(partial(self._sleep, answer))

    def _full(self) -> str:
        return f"{self.capacity} events wait" if self._used() >= self.capacity else ""

    def fill(self, items: Sequence[Any]) -> None:
        """Queue items for which there is room, before the lane has publishers."""
        with self._lock:
            self._queue.extend(items)

    def _wake_up(self) -> None:
        try:
            self._armed = True
            if not self.wake():
                self._armed = False
                self.discard()
        except BaseException:
            # A KeyboardInterrupt can strike in here. Undone, so that the next publisher wakes the consumer instead.
            self._armed = False
            raise
        if self._lost:  # meanwhile, and with it the event
            raise LaneClosedError(f"{self.label} is offloaded, but {self._reason}")

    def _make_room(self, what: str, option: str, drop: Callable[[], bool], *, waited: bool) -> threading.Lock | Outcome | None:
        """Make room as the policy allows. Return None if there is room now, else a bell to wait for, or ``DROPPED``."""
        if self._closed or (self._retired and waited):
            if self._retired and (not waited or self.full != "block"):
                return Outcome.DROPPED  # of a cancelled subscription, by a publish that was under way when the bus closed
            raise LaneClosedError(f"{self.label} is offloaded, but {self._reason}")
        if self.warns:
            self.warns, self._filled = False, what  # logged without the lock, because loggers may publish
        if self.full == "block":
            if self._owns():
                raise LaneFullError(
                    f"the lane of {self.label} is full ({what}) and its publisher runs on a thread or event loop of its bus, "
                    f"so waiting could be a deadlock; give the lane a larger {option}= or another full= policy"
                )
            return self._bell()
        if self.full == "raise":
            raise LaneFullError(
                f"the lane of {self.label} is full ({what}); its handler is slower than its events: give it a larger "
                f'{option}=, a filter such as every=, or full="drop_old"'
            )
        return None if self.full != "drop_new" and drop() else Outcome.DROPPED

    def _drop_for_slot(self) -> bool:
        self._drop(1 if self.full == "drop_old" else len(self._queue))
        return True

    def _drop(self, most: int) -> None:
        for _ in range(min(most, len(self._queue))):
            self._dropped += 1  # first: an interrupt in between counts one event twice, and loses none
            self._queue.popleft()
        self._notify()

    def _warn(self) -> None:
        """Log how fast the handler is and how fast its events come: since the queue was empty last, it has had no rest."""
        what, self._filled = self._filled, ""
        seconds, done, came = map(sub, self._moment(), self._idle)
        if not done and seconds < _UNKNOWN:
            self.warns = True  # when the speed of the handler is known
            return
        takes = f"takes {seconds / done * 1e3:.3g} ms an event" if done else f"has not done one event in {seconds:.3g} s"
        loss = "training waits for it" if self.full == "block" else "events are dropped"
        log.warning(
            f"a lane is full ({what}): its handler {takes}, and an event comes each {seconds / max(came, 1) * 1e3:.3g} ms, so "
            f"{loss}. Call it less often (every=, or the interval of the hook) or reduce its work; a larger lane only "
            "helps against bursts",
            id="lane-full",
            handler=self.label,
        )

    def _sleep(self, bell: threading.Lock) -> None:
        """Wait until something changes, or for a moment; log once which handler keeps its publishers waiting."""
        may_wait("room in a lane")
        self.wake()  # the consumer may be lingering, and that saves nothing now
        if bell.acquire(timeout=POLL.value):
            self._stuck_since = None
            return
        now = time.monotonic()
        self._stuck_since = self._stuck_since or now
        if now - self._stuck_since >= PATIENCE.value and not self._warned:
            self._warned = True
            log.warning(
                f"publishing waits for a handler: its lane is full, and nothing has left it for {PATIENCE.value:g} s. Find out "
                "where it hangs; timeout= ends such calls, and another full= policy does not wait for them",
                id="publisher-waits",
                handler=self.label,
            )

    # -------------------------------------------------------------------------------------------- consumer's side

    def attach(self, wake: Callable[[], object], owns: Callable[[], bool]) -> None:
        """Open the lane to publishers. ``owns`` returns True on a thread that must not wait for a slot, or raises."""
        with self._lock:
            self._wake = wake
            self._owns = owns
            self._armed = False
            self._stuck_since, self._warned = None, False
            self._idle = self._moment()
            self._closed = self._lost = False
            self._reason = _NOT_OPEN
            self._set_bound()

    def close(self, reason: str = _NOT_OPEN) -> None:
        """Refuse events from now on; publishers that wait for a slot are released with an error. Idempotent."""
        with self._lock:
            self._closed = True
            self._reason = reason
            self._notify()
        self.wake()

    def retire(self, reason: str) -> None:
        """Take only events of publishes under way; publishers that wait for a slot are released with an error."""
        with self._lock:
            self._retired = True
            self._reason = reason
            self._notify()
        self.wake()

    def give_up(self, reason: str) -> None:
        """Retire, and drop all events, queued or being published."""
        self.given_up = True
        self.retire(reason)
        self.discard()

    def detach(self, lost: str = "") -> None:
        """Forget the consumer, which is gone, as its loop may be, and drop the queued events.

        With the reason why it was ``lost``, a publisher whose event is dropped gets an error.
        """
        with self._lock:
            self._closed = True
            if lost:
                self._lost, self._reason = True, lost
            self._set_bound()
            self._wake = None
            self._owns = bool
            self._armed = False  # so that a late publisher looks for the consumer, and discards its event
        self.discard()

    def discard(self) -> None:
        """Drop the queued events."""
        with self._lock:
            self._drop(len(self._queue))

    def is_held(self) -> bool:
        """Return True if this thread holds the lane's lock."""
        return is_held(self._lock)

    @property
    def served(self) -> bool:
        """True while it has a consumer."""
        return self._wake is not None

    @property
    def ending(self) -> bool:
        """True once the lane is closed or retired."""
        return self._closed or self._retired

    def finished(self) -> bool:
        """Return True if it is ending and every slot is free."""
        with self._lock:
            return self.ending and not self._used()

    def wake(self) -> bool:
        """Wake the consumer, needed or not; False if there is none."""
        wake = self._wake
        if wake is None:
            return False
        wake()
        return True

    def take(self, most: int, below: int | None = None) -> list[Any]:
        """Return up to ``most`` queued items, oldest first, with numbers ``below`` this one; their slots are free again."""
        with self._lock:
            if not self._queue:
                return []
            before = len(self._held)
            most = min(most, len(self._queue))
            if below is not None:
                most = next((n for n in range(most) if self._queue[n][2] >= below), most)
            # One call, which a Ctrl-C or the handler of a signal waits for (see `signal`): an item is always in one of the two.
            self._held.extend(map(deque.popleft, repeat(self._queue, most)))
            self._lingers = False
            self._notify()
            return self._held[before:]

    def first(self) -> int | None:
        """Return the number of the oldest queued item, if there is one."""
        with self._lock:
            return self._queue[0][2] if self._queue else None

    def values(self, items: list[Any]) -> list[Any]:
        """Return items without the context and the number that they were queued with."""
        return [item[1] for item in items] if self.contextual or self.number is not None else items

    def waiting(self) -> list[Any]:
        """Return the items that the handler has not finished, oldest first; waits for none of them."""
        with self._lock:
            items = [*self._held, *self._queue.copy()]  # publishers append without the lock
        return self.values(items)

    def begin_lingering(self) -> None:
        """Have a publisher wake the consumer early if half of the lane fills up; not if that would be every few events."""
        with self._lock:
            self._idle = self._moment()
            self._lingers = self._half >= _WORTH_A_WAKE_UP
            self._set_bound()

    def count(self, *, delivered: int = 0, dropped: int = 0, failed: int = 0) -> None:
        """Count items that the consumer took: the handler returned, was not called, or raised."""
        with self._lock:
            self._delivered += delivered
            self._dropped += dropped
            self._failed += failed
            del self._held[: delivered + dropped + failed]
            if self._waiting:
                self._notify()

    def disarm(self) -> bool:
        """Announce that the consumer is about to sleep; False if an item came in meanwhile and it must not."""
        with self._lock:
            self._armed = False
            if self._queue:
                self._armed = True
                return False
            if not self.linger:
                self._idle = self._moment()
            return True

    # ----------------------------------------------------------------------------------------------- both sides

    @property
    def stats(self) -> DrainReport:
        """The counts at this moment, since the lane was made."""
        with self._lock:
            return DrainReport(self._delivered, self._dropped + self._refused, self._failed, self._used() + len(self._held))

    @property
    def bytes(self) -> int:
        """Size of the captured tensors that are pending."""
        return 0

    def _used(self) -> int:
        return len(self._queue)

    def _amounts(self) -> tuple[int, int]:
        """Return the number of events that are delivered, dropped from the queue or failed; and that of all that came."""
        done = self._delivered + self._dropped + self._failed
        return done, done + self._used() + len(self._held)

    def _moment(self) -> tuple[float, int, int]:
        """Return the time, and the number of events that the handler is done with, and of all that came."""
        return time.monotonic(), self._delivered + self._failed, self._amounts()[1]

    def join(self, deadline: Deadline) -> bool:
        """Wait until all events published before this call are done; False if ``deadline`` came first."""
        return Mark(self, deadline).synchronize()

    def came(self) -> int:
        """Return the number of events that have come so far."""
        with self._lock:
            return self._amounts()[1]

    def is_done(self, number: int) -> bool:
        """Return True if so many of the events that came are delivered, failed or dropped, or all of them."""
        with self._lock:
            done, came = self._amounts()
            return done >= number or done == came  # came: less than the number, if an event could not be copied

    def wait_for_change(self, number: int, seconds: float) -> None:
        """Unless :meth:`is_done`, wait until something changes, for at most ``seconds``."""
        may_wait("a lane")
        with self._lock:
            if self.is_done(number):
                return
            bell = self._bell()
        bell.acquire(timeout=seconds)

    def become_inert(self) -> None:
        """Close the lane in a forked child: it has no consumer, and a thread of the parent may have held the lock."""
        self._lock = new_lock()
        self._waiting.clear()
        self._queue.clear()
        self.detach()

    def _bell(self) -> threading.Lock:
        """Return a lock that is released when something changes; called with the lane's own lock held."""
        bell = threading.Lock()
        bell.acquire()
        self._waiting.append(bell)
        return bell

    def _notify(self) -> None:
        """Wake the waiting threads: something has changed; called with the lock held."""
        self._set_bound()
        while self._waiting:
            self._waiting.popleft().release()

    def _set_bound(self) -> None:
        most = self._half if self._lingers else self.capacity
        self._bound = 0 if self._closed else most
