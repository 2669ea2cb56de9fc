"""The consumer of a lane whose handler blocks: a daemon thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any

from eventloop.offload.consumer import Consumer, Delivery, arrive
from eventloop.offload.worker import Worker


class ThreadConsumer(Consumer):
    """Delivers a lane's items to a blocking handler on a thread of its own, or through a ``worker`` that calls it elsewhere.

    A daemon thread of ours, not one of anyio's workers: an abandoned worker would keep the interpreter from exiting.
    """

    def __init__(
        self, delivery: Delivery, *, worker: Worker | None, thread: Callable[[Callable[[], None]], threading.Thread]
    ) -> None:
        super().__init__(delivery if worker is None else delivery._replace(handler=worker.call))
        self._bell = threading.Lock()  # taken: asleep until somebody releases it; a raw lock cannot be left half set
        self._bell.acquire()
        self._abandoned = False
        self._starting = threading.Lock()
        self._worker = worker
        self._make_thread = thread
        self.thread: threading.Thread | None = None

    def ring(self) -> None:
        """Wake the thread, or start it; harmless if it is awake."""
        with self._starting:
            if self.thread is None and not self._abandoned:
                self._start()
        try:
            self._bell.release()
        except RuntimeError:  # "release unlocked lock": already rung
            return

    def abandon(self, *, now: bool) -> None:
        """Deliver nothing more after the item in progress, which a worker process does not finish."""
        self._abandoned = True
        if self._worker is not None:
            self._worker.interrupt(now=now)
        self.ring()

    def _start(self) -> None:
        self._began(self)
        try:
            self.thread = self._make_thread(self._run)
            self.thread.start()
        except BaseException:
            # "can't start new thread", or Ctrl-C, after which the thread may run all the same: it finds that it is not ours.
            self.thread = None
            self._ended(self)
            raise

    def _run(self) -> None:
        with self._starting:
            if self.thread is not threading.current_thread():
                return
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - SystemExit from a handler, a logger that raises: told, never hung
            self._break(error)
            self._stop_worker()

    def _serve(self) -> None:
        lingered = False
        while not self._abandoned:
            if items := self._take():
                lingered = False
                self._deliver(items)
            elif not lingered and self.lane.linger and not self.lane.ending:
                lingered = True
                self._bell.acquire(timeout=self.lane.linger)
            elif self.lane.disarm():
                if self._finish():
                    return
                self._bell.acquire()
                lingered = False
        self._drop_held()
        self._stop_worker()

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    def _finish(self) -> bool:
        if not self.lane.finished():
            return False  # if that changes now, this thread is rung
        # While the bus, as it closes, still waits for this thread. Should another event come, another worker is started.
        self._stop_worker()
        with self._starting:
            if not self.lane.finished():
                return False
            self.thread = None  # who rings from now on starts another
            self._ended(self)
            return True

    def _deliver(self, items: list[Any]) -> None:
        for context, values in self._calls(items):
            if self._abandoned or self.lane.given_up:
                self._drop_held()
                return
            self._call(context, values)

    def _call(self, context: Context, items: list[Any]) -> None:
        arrived: list[Any] = []
        try:
            arrived = [arrive(item) for item in items]
            context.run(self._handler, arrived if self._batch is not None else arrived[0])
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is reported, and the lane goes on
            if self._abandoned:
                self._count_failed(len(items))  # the bus has closed and said so
            else:
                self._fail(error, items, arrived)
        except BaseException:
            self._fail_and_end(items, arrived)
            raise
        else:
            self._done(len(items))
