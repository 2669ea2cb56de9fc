"""Agree on requests of any rank without a collective, for runs inside another library's trainer.

There, a rank may lack a bus or evaluate alone, and a collective would hang or mix with the trainer's. Instead the ranks write
to the key-value store of their process group, in rounds:

1. A rank with requests stops at its next safe point, and opens a round with the name of that point (:data:`Point`).
2. On each rank a thread, the *agent*, answers for the training thread. It waits briefly until the training thread reaches the
   same point, because all ranks usually have the same requests there. If the training thread has requests at that point too,
   it waits there until the round ends. Else it continues, at most to the end of its current iteration.
3. Rank 0's agent writes the result: the requests of all ranks, and the point where they take effect. This is the point of the
   round if all ranks wait there, and else the end of an iteration that no rank has passed.

Beyond 64 ranks the first one of each block (:class:`~trainbus.eventloop.training.distributed.blocks.Blocks`) passes messages
on: between its block's store, which the others in the block use, and that of the process group. It merges the answers of its
block.

Without requests, a safe point costs the training thread less than a microsecond. Each agent polls a store ten times a
second, which takes 10 µs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.coordinator import Coordinator, Rates, Requests, first
from trainbus.eventloop.training.distributed.blocks import Blocks
from trainbus.eventloop.training.distributed.mailbox import Mailbox
from trainbus.eventloop.world import this_rank, world_size

_IDLE: Final = 0.1
"""Seconds between two polls for a round of another rank."""

_LOOK: Final = 0.002
"""Seconds between two polls during a round."""

_SKEW: Final = 2.0
"""Seconds that an agent waits for its training thread to reach the point of the round."""

PATIENCE = 60.0
"""Seconds after which a round without an answer of a rank is given up."""

_ENDED: Final = "the training has ended"
_ON_NO_RANK: Final = "the last requests, such as run.stop(), take effect on no rank"

Point = tuple[int, int]
"""A safe point: the number of iterations, and how many safe points came after the last of them."""

log = get_logger()


class _Answer(msgspec.Struct):
    """The answer of one rank or of several, or the result of a round."""

    point: Point
    """The point at which all these training threads wait, or the last one that any passed; in a result, the point of effect."""
    stands: bool = True
    """True if all wait at this point."""
    stop: bool = False
    save: bool = False
    cancelled: bool = False
    paused: bool = False
    rates: Rates = []
    reason: str = ""
    instead: str = ""
    exit_code: int = 0
    failed: str = ""
    """The reason why a round has no result."""


class Rounds(Coordinator):
    """Make requests of any rank take effect on all ranks at the same safe point; see the module. Values are not exchanged.

    Args:
        name: the name of the mailboxes; equal on all ranks.
        own: the requests of this rank.
        iterations: returns the number of finished iterations.
    """

    pauses_at_once = True

    def __init__(self, name: str, own: Requests, iterations: Callable[[], int]) -> None:
        super().__init__(own)
        self.agreed = Requests()
        self._name = name
        self._rank, self._size = this_rank(), world_size()
        self._blocks = Blocks(self._rank, self._size)
        # Made by the agent, because torch looks up the names of hosts when it connects.
        self._far: Mailbox
        """Between the first ranks of all blocks."""
        self._near: Mailbox
        """Within this block."""
        self._iterations = iterations
        # Written by the training thread.
        self._point: Point = (iterations(), 0)
        """The last safe point."""
        self._blocked_at: Point | None = None
        """The safe point at which the training thread waits with requests; the agent sets it to None."""
        # Written by the agent.
        self._limit: Point | None = None
        """The safe point at which the training thread must wait for the result of the round."""
        self._results: deque[_Answer] = deque()
        """Results that the training thread has not applied yet."""
        self._announced: tuple[bool, bool, bool] = (False, False, False)
        self._number = 0
        self._to_join = [self._key("joined", rank) for rank in range(self._size)] if self._rank == 0 else []
        self._ready = False
        """True once all ranks have joined."""
        self._asks_until: float | None = None
        """When this agent gives up to open a round, for ranks that have not joined."""
        self._ended = False
        self._wake = threading.Event()
        self._agent = threading.Thread(target=self._run, name=f"trainbus agent of rank {self._rank}", daemon=True)
        self._agent.start()

    def close(self) -> None:
        """End the agent when the training ends. Drops requests that the ranks have not agreed on."""
        own, agreed = self.own, self.agreed
        own.stop, own.reason = own.stop or agreed.stop, own.reason or agreed.reason
        own.instead = own.instead or agreed.instead
        self._ended = True
        self._wake.set()
        # At the exit of the interpreter, a thread in a call of the store could abort the process (python/cpython#87135).
        self._agent.join(_SKEW)

    # ------------------------------------------------------------------------------------------- the training thread

    def agree(self, *, between: bool = False) -> Requests:
        """Enter the safe point at the end of an iteration, or another one between two; apply what takes effect there."""
        if not between:
            self._arrive((self._iterations(), 0))
        elif self.agreed.paused:
            self._apply()
        else:
            self._arrive((self._point[0], self._point[1] + 1))
        return self.agreed

    def _arrive(self, point: Point) -> None:
        # The order matters, because the agent may read at any moment. It must not see this point without the requests made
        # before it. And either it sees this point, or this thread sees its limit; see _answer.
        if self._pending():
            self._blocked_at = point
        self._point = point
        if self._blocked_at is not None or self._is_past_limit(point):
            self._wait(point)
        elif self._results:
            self._apply()

    def _wait(self, point: Point) -> None:
        while self._agent.is_alive():
            waits = self._blocked_at is not None or self._is_past_limit(point)
            self._apply()  # after the line above: the agent hands a result over before it ends the wait
            if self.agreed.paused:  # the next call goes on
                return
            if waits:
                self._wake.set()
                time.sleep(_LOOK)
            elif self._pending():
                self._blocked_at = point
            else:
                return

    def _is_past_limit(self, point: Point) -> bool:
        limit = self._limit
        return limit is not None and point >= limit

    def _apply(self) -> None:
        """Apply the results that take effect here: up to the first pause, or in a pause, up to its end.

        All ranks pause at the same point, so later results take effect in the pause on all ranks. Some ranks enter it after
        these results are known, others before.
        """
        agreed, paused = self.agreed, self.agreed.paused
        while agreed.paused == paused and self._to_apply():
            result = self._results[0]
            agreed.stop, agreed.save = agreed.stop or result.stop, agreed.save or result.save
            if result.save:  # it holds what this rank has requested since its answer, too
                self.own.save = False
            agreed.cancelled = agreed.cancelled or result.cancelled
            agreed.paused = result.paused and not (agreed.stop or agreed.cancelled)
            agreed.rates.extend(result.rates)
            agreed.reason, agreed.instead = agreed.reason or result.reason, agreed.instead or result.instead
            agreed.exit_code = agreed.exit_code or result.exit_code
            self._results.popleft()  # last: now the agent may answer again

    def _pending(self) -> bool:
        own = self.own
        saves = own.save and not any(result.save for result in tuple(self._results))  # one that is agreed on will hold it
        return saves or bool(own.rates) or (own.stop, own.cancelled, own.paused) != self._announced

    # ----------------------------------------------------------------------------------------------------- the agent

    def _run(self) -> None:
        try:
            self._far = self._near = Mailbox(self._name)
            near = self._blocks.join(self._far, self._name, self._ends)
            if near is None:
                return
            self._near = near
            self._far.put(self._key("joined", self._rank))
            idle = _IDLE / 4 if self._passes_on else _IDLE
            while not self._ended:
                self._ready = self._ready or self._all_joined()
                self._open_if_asked()
                if self._arrives(self._key("opened")):
                    self._take_part()
                elif self._blocked_at is None:
                    self._wake.wait(idle)
                    self._wake.clear()
                else:
                    time.sleep(_LOOK)
            self._near.put("left")
            if self._blocks.leads:
                self._far.put("left")
        except (RuntimeError, OSError) as error:  # the process with the store has ended
            if not self._ended:
                log.warning(
                    "requests such as run.stop() no longer reach the other ranks", id="requests-not-sent", error=str(error)
                )
        finally:
            self._release()

    def _ends(self) -> bool:
        """Return True once the training ends. Until then, while this rank waits for its block, refuse what it asks for."""
        self._open_if_asked()
        return self._ended

    @property
    def _passes_on(self) -> bool:
        """True if this agent connects its block to the other ones."""
        return self._blocks.leads and len(self._blocks.firsts) > 1

    def _all_joined(self) -> bool:
        if self._rank == 0:
            self._to_join = self._far.missing(self._to_join)
            if not self._to_join:
                self._far.put("ready")
        return self._arrives("ready")

    def _arrives(self, key: str) -> bool:
        """Return True if a message is there, for this block, too. Pass it on between its block and the other ones."""
        if self._near.has(key):
            if self._passes_on:
                self._far.offer(key, self._near.get(object, key)[0])
            return True
        if self._passes_on and self._far.has(key):
            self._near.offer(key, self._far.get(object, key)[0])
            return True
        return False

    def _open_if_asked(self) -> None:
        """Open a round for requests of this rank, unless another one has. Wait a while for ranks that have not joined."""
        if not ((self._blocked_at is not None or self.agreed.paused) and self._pending()):
            return
        if self._ready:
            self._near.offer(self._key("opened"), _Answer(self._blocked_at or self._point))
            self._asks_until = None
            return
        self._asks_until = self._asks_until or time.monotonic() + 5 * _SKEW
        if self._others_left():  # before rank 0 knew that all had joined, so it never will
            self._refuse()
            log.warning(_ON_NO_RANK, id="requests-after-end", reason=_ENDED)
        elif time.monotonic() > self._asks_until and (missing := self._missing()):
            self._refuse()
            log.error(
                "run.stop(), checkpoints.save(), pause(), cancel() or set_lr() is ignored, because it would hang the training: "
                "these ranks train without a bus. Call attach(bus, trainer) on all ranks",
                id="requests-ignored",
                ranks=missing,
            )

    def _refuse(self) -> None:
        self._take()
        self._release()
        self._asks_until = None

    def _others_left(self) -> bool:
        """Return True if the training of another rank, in this block or that of a first one, has ended."""
        return self._near.has("left") or (self._passes_on and self._far.has("left"))

    def _take_part(self) -> None:
        """Answer, and pass the result of the round to the training thread."""
        opened = self._near.get(_Answer, self._key("opened"))[0]
        self._near.put(self._key("answer", self._rank), self._answer(opened.point))
        result = self._result()
        if result.failed:
            log.warning(_ON_NO_RANK, id="requests-without-effect", reason=result.failed)
        else:
            self._results.append(result)
        self._number += 1
        self._release()  # last: the training thread continues

    def _answer(self, opened: Point) -> _Answer:
        deadline = time.monotonic() + _SKEW
        while not self._ended and (self._to_apply() or (self._point < opened and time.monotonic() < deadline)):
            time.sleep(_LOOK)
        stands = self._blocked_at or (self._point if self.agreed.paused else None)
        if stands is not None:
            return self._take(stands)
        # The training thread writes the point and then reads the limit; here the order is reversed. So it waits at this
        # limit, unless it passed it before the limit was written.
        while True:
            passed = self._point
            self._limit = (passed[0] + 1, 0)
            if self._point < self._limit:
                return self._take(passed, stands=False)

    def _to_apply(self) -> bool:
        return bool(self._results) and (self.agreed.paused or self._results[0].point <= self._point)

    def _take(self, point: Point = (0, 0), *, stands: bool = True) -> _Answer:
        """Take the requests of this rank; they then count as announced."""
        own = self.own
        self._announced = own.stop, own.cancelled, own.paused
        save, own.save = own.save, False
        stop, cancelled, paused = self._announced
        why = own.reason, own.instead, own.exit_code
        return _Answer(point, stands, stop, save, cancelled, paused, own.take_rates(), *why)

    def _result(self) -> _Answer:
        begun, key = time.monotonic(), self._key("result")
        # Whose answers this agent merges: of its block, and rank 0's then of all blocks.
        answers = [self._key("answer", rank) for rank in self._blocks.members] if self._blocks.leads else []
        blocks = [self._key("block", first) for first in self._blocks.firsts] if self._rank == 0 else []
        while not self._arrives(key):
            waited, failed = time.monotonic() - begun, ""
            if self._ended or self._others_left():
                failed = _ENDED
            elif waited > PATIENCE and answers:
                failed = f"no answer of rank {', '.join(_ranks(self._near.missing(answers)))}"
            elif waited > PATIENCE + _SKEW:  # later, because the one above knows the ranks
                failed = f"no answer of the block of rank {', '.join(_ranks(self._far.missing(blocks))) or self._blocks.first}"
            if failed:  # of all results, the first one in the store of all ranks counts
                self._far.offer(key, _Answer((0, 0), failed=failed))
                self._near.offer(key, self._far.get(_Answer, key)[0])
            elif answers and self._near.has(*answers):
                self._far.put(self._key("block", self._rank), _merged(self._near.get(_Answer, *answers)))
                answers = []
            elif blocks and self._far.has(*blocks):
                self._far.offer(key, _effect(_merged(self._far.get(_Answer, *blocks))))
            else:
                time.sleep(_LOOK)
        return self._near.get(_Answer, key)[0]

    def _missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        keys = {self._key("joined", rank): rank for rank in range(self._size)}
        return [keys[key] for key in self._far.missing([*keys])]

    def _release(self) -> None:
        self._blocked_at = self._limit = None

    def _key(self, what: str, rank: int | None = None) -> str:
        number = "" if what == "joined" else f"/{self._number}"
        return f"{what}{number}{'' if rank is None else f'/{rank}'}"


def _ranks(keys: list[str]) -> list[str]:
    return [key.rpartition("/")[2] for key in keys]


def _merged(answers: list[_Answer]) -> _Answer:
    points = [one.point for one in answers]
    rates = [rate for one in answers for rate in one.rates]
    return _Answer(
        point=max(points),
        stands=all(one.stands for one in answers) and len(set(points)) == 1,
        stop=any(one.stop for one in answers),
        save=any(one.save for one in answers),
        cancelled=any(one.cancelled for one in answers),
        paused=any(one.paused for one in answers),
        rates=[*dict.fromkeys(reversed(rates))][::-1],  # usually all ranks set the same; the last ones count
        reason=first(one.reason for one in answers),
        instead=first(one.instead for one in answers),
        exit_code=max(one.exit_code for one in answers),
    )


def _effect(answer: _Answer) -> _Answer:
    """Return the result: where all wait it takes effect there, and else at the end of an iteration that none has passed."""
    if not answer.stands:
        answer.point = (answer.point[0] + 1, 0)
    return answer


_runs = 0


def join_rounds(own: Requests, iterations: Callable[[], int]) -> Rounds:
    """Return the :class:`Rounds` of a new training. All ranks with a bus must call it."""
    global _runs
    _runs += 1
    return Rounds(f"rounds/{_runs}", own, iterations)
