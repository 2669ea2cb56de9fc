"""Event loops that run the tasks of async handlers: one on a thread of the bus, or the one that the program runs."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Self, TypeVar

import anyio

from trainbus.eventloop.errors import BusStateError
from trainbus.eventloop.locks import is_held, may_wait
from trainbus.eventloop.notebook import in_notebook
from trainbus.eventloop.offload.callers import OwnedThread, note_outcome

T = TypeVar("T")

Backend = Literal["asyncio", "trio"]
CANCEL_GRACE = 0.5  # seconds that cancelled tasks have to end, at least
_WAKE = 0.2  # seconds, in a notebook
_LOOK = 0.2  # seconds between looks of a thread that waits for the start of a loop
_LOOK_SOON = 0.005  # seconds, of a task
CallSoon = Callable[[Callable[[], object]], object]


class Loop:
    """Start tasks in an event loop, from callbacks of that loop.

    Nothing but :meth:`stop` and the end of the loop ends the tasks: code that cancels every task of a program does not reach
    them.
    """

    name: str  # for the log, when it does not end

    def __init__(self) -> None:
        self.stopping = False
        self._call_soon: CallSoon | None = None  # None until it runs
        self._early: deque[Callable[[], object]] = deque()  # callbacks until then
        self._arrivals: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._bell: anyio.Event
        self._ready = threading.Event()
        self._over = threading.Event()

    def start(self) -> None:
        """Wait until the loop takes tasks. Hold no lock, because code that the loop calls as it starts may need it."""
        may_wait("the start of an event loop")
        while not self._ready.wait(_LOOK) and not self.stopping:
            continue

    def stop(self, grace: float) -> bool:
        """Cancel the tasks and wait, not on the loop's thread; False if ``grace`` seconds were too few."""
        self.stopping = True
        self.call_soon(self._ring)
        may_wait("the end of an event loop")
        return self.ended or self._over.wait(grace)

    @property
    def takes_tasks(self) -> bool:
        """True if :meth:`start` need not wait."""
        return self._ready.is_set()

    @property
    def ended(self) -> bool:
        """True if the loop has ended, and with it its tasks."""
        return self._over.is_set()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run ``callback``, which must not raise, on the loop's thread; does not wait for it. Ignored once it has ended."""
        call_soon = self._call_soon
        if call_soon is None:
            self._early.append(callback)
            if (call_soon := self._call_soon) is None:
                return  # the loop makes this call as it begins
            callback = self._call_early
        try:
            call_soon(callback)
        except RuntimeError:  # closed (asyncio), finished (trio)
            if not self.stopping and not self.ended:
                raise

    def spawn(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start ``task``; called on the loop's thread."""
        self._arrivals.append(task)
        self._bell.set()

    def _ring(self) -> None:
        self._bell.set()

    def _call_early(self) -> None:
        while self._early:
            self._early.popleft()()

    def _begin(self) -> None:
        self._bell = anyio.Event()
        self._call_soon = threadsafe_call()  # before the early calls: one that is added from now on is made as well
        self._call_early()
        self._ready.set()

    async def _serve(self) -> None:
        try:
            self._begin()
            # Tasks are started from in here: anyio's task groups cannot be used from a bare callback of the loop.
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() if in_trio() else _HiddenTasks() as group:
                    while not self.stopping:
                        while self._arrivals:
                            group.start_soon(self._arrivals.popleft())
                        await self._bell.wait()
                        self._bell = anyio.Event()
                    group.cancel_scope.cancel()
        finally:
            self._over.set()


class LoopThread(Loop):
    """An event loop on a daemon thread of a runtime, started when the first async handler needs it."""

    name = "trainbus event loop"

    def __init__(self, backend: Backend, owner: object) -> None:
        super().__init__()
        self._backend = backend
        self._owner = owner
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()

    def start(self) -> None:
        """Start the loop if it is not running yet; raises BusStateError if that fails."""
        self._start_thread()
        if is_held(self._starting):
            return  # the handler of a signal, in the middle of the start
        super().start()
        if self._failure is not None:
            raise BusStateError(f"the {self._backend} event loop did not start: {self._failure}") from self._failure

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` on the loop's thread, which is started if need be."""
        self._start_thread()
        super().call_soon(callback)

    def stop(self, grace: float) -> bool:
        """End the loop and its thread."""
        self.stopping = True  # also where Ctrl-C came while the thread was started, and it is not alive yet
        thread = self._thread
        if thread is None:
            return True
        if thread.is_alive() and super().stop(grace):
            thread.join(grace)
        return not thread.is_alive()

    def _start_thread(self) -> None:
        # Not waiting for the lock: another thread starts it, or this one, which a signal has interrupted in here.
        if self._thread is not None or self.stopping or is_held(self._starting):
            return
        if self._starting.acquire(blocking=False):
            try:
                if self._thread is None:
                    thread = OwnedThread(self._owner, self._run, self.name)
                    thread.start()
                    self._thread = thread  # after start(): where Ctrl-C strikes in there, the thread may run, but not as ours
            finally:
                self._starting.release()

    def _run(self) -> None:
        with self._starting:
            if self._thread is not threading.current_thread():
                return
        # asyncio on uvloop where that is installed
        options = {"use_uvloop": find_spec("uvloop") is not None} if self._backend == "asyncio" else {}
        try:
            anyio.run(self._serve, backend=self._backend, backend_options=options)
        except BaseException as error:  # noqa: BLE001 - handed to start(), which raises it on the caller's thread
            self._failure = error
            self._ready.set()
            self._over.set()

    async def _serve(self) -> None:
        if not in_trio() and (task := asyncio.current_task()) is not None:
            _hide(task)
        await super()._serve()


class HostLoop(Loop):
    """The loop of the program, asyncio's or trio's. It is made in that loop, and used once ``begun`` is set.

    Its tasks are not children of the task that opens and closes the bus. When the host's scope is cancelled, what was published
    is still delivered (for as long as the bus's ``abort_timeout`` allows), and only then :meth:`stop` cancels the tasks. A task
    that continues after its cancellation is abandoned, which a child task could not be.

    If the loop ends before the bus is closed, what was published is delivered as well, for at most ``patience`` seconds.
    """

    name = "tasks in the host's event loop"

    def __init__(self, patience: float = 0.0) -> None:
        super().__init__()
        self.begun = anyio.Event()
        self.pending: Callable[[], bool] = lambda: False
        """Returns True while its tasks have events."""
        self.on_end: Callable[[], object] = lambda: None
        """Called on the loop's thread when the loop ends and the bus is not closed, before the tasks are cancelled."""
        self._patience = patience
        self._ident = threading.get_ident()
        self._leaving = False
        self._task: object  # held here: asyncio holds no task
        self._is_closed: Callable[[], bool] = lambda: False
        if in_trio():
            import trio

            self._task = trio.lowlevel.spawn_system_task(self._serve, context=copy_context())
        else:
            loop = asyncio.get_running_loop()
            self._is_closed = loop.is_closed
            self._task = _hide(loop.create_task(self._serve()))

    @property
    def here(self) -> bool:
        """True on the loop's thread, which must not wait, also in the host's own code."""
        return threading.get_ident() == self._ident and not self.ended

    @property
    def ended(self) -> bool:
        """True if the loop has ended, and with it the tasks; also if it was closed as it was."""
        return self._over.is_set() or self._is_closed()

    def _begin(self) -> None:
        super()._begin()
        self.begun.set()

    async def _serve(self) -> None:
        if in_trio():
            async with anyio.create_task_group() as group:
                group.start_soon(self._end_with_trio)
                await super()._serve()
                group.cancel_scope.cancel()
            return
        end = self._end_with_asyncio()
        await anext(end)
        try:
            await super()._serve()
        finally:
            if not self._leaving:
                await end.aclose()

    async def _end_with_trio(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:  # the program's main task has ended, and trio cancels its system tasks; or this loop was stopped
            await self._leave()

    async def _end_with_asyncio(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:  # asyncio.run() closes the asynchronous generators of its loop when its tasks have ended
            await self._leave()

    async def _leave(self) -> None:
        if self.stopping:
            return
        self._leaving = True
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(self._patience):
                while not self.stopping and self.pending():  # noqa: ASYNC110 - a lane sets no event of the loop
                    await anyio.sleep(_LOOK_SOON)
            if not self.stopping:
                self.on_end()
                self.stopping = True
                self._ring()
            with anyio.move_on_after(CANCEL_GRACE):
                while not self._over.is_set():  # noqa: ASYNC110 - tells other threads, too
                    await anyio.sleep(_LOOK_SOON)


# --------------------------------------------------------------------------------------------------- tasks of asyncio

# Programs end by `for task in asyncio.all_tasks(): task.cancel()`, and so does asyncio.run(). They mean their own tasks. A
# consumer that they cancelled would lose the event that its handler is busy with. So nothing finds the tasks of a bus. They end
# when the bus closes, as the cancelled tasks of the program leave `async with bus:`.


def _hide(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """Take a task out of ``asyncio.all_tasks()``; hold a reference, because asyncio has none."""
    # The function that a task calls when it ends: https://docs.python.org/3/library/asyncio-extending.html
    asyncio.tasks._unregister_task(task)
    return task


def forgive() -> None:
    """Undo the cancellations of this task of asyncio, which were not meant for it; does nothing in other loops."""
    task = None if in_trio() else asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


class _HiddenTasks:
    """The part of anyio's task groups that a loop needs, with hidden tasks. Their exceptions are not raised."""

    def __init__(self) -> None:
        self.cancel_scope = self
        self._scopes: set[anyio.CancelScope] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelled = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task."""
        task = _hide(asyncio.get_running_loop().create_task(self._run(function)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel the tasks, again and again, as anyio does."""
        self._cancelled = True
        for scope in self._scopes:
            scope.cancel()

    async def _run(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                if self._cancelled:
                    scope.cancel()
                await function()
            finally:
                self._scopes.discard(scope)


# ----------------------------------------------------------------------------------------------------- between threads


def threadsafe_call() -> CallSoon:
    """Return the running loop's function for calls from other threads that do not wait (anyio has none).

    Raises:
        RuntimeError: no event loop is running here.
    """
    if in_trio():
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon
    return asyncio.get_running_loop().call_soon_threadsafe


def in_trio() -> bool:
    """Return True if the loop that runs here is trio's."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


async def in_thread(function: Callable[[], T], name: str, *, cancelled: Callable[[], object]) -> T:
    """Call ``function`` on a new daemon thread, in the task's context variables, and return its result.

    anyio has a limited number of worker threads for the whole program, and waits for them at its exit.

    Args:
        function: a blocking function.
        name: name of the thread.
        cancelled: called in the task when it is cancelled; must make ``function`` end soon. The task waits for its end.

    Raises:
        BaseException: the error of ``function``, also where the task was cancelled; else its cancellation.
    """
    may_wait(f"the thread {name!r}")
    outcome: Future[T] = Future()
    over = anyio.Event()
    work = partial(_work, function, outcome, threadsafe_call(), over)
    context = copy_context()
    set_library(context, None)  # that thread runs no event loop
    threading.Thread(target=context.run, args=(work,), name=name, daemon=True).start()
    try:
        await _wait(over)
    except BaseException:
        cancelled()
        while not over.is_set():
            with suppress(anyio.get_cancelled_exc_class()):  # asyncio's own task.cancel(), again: no scope shields from that
                with anyio.CancelScope(shield=True):
                    await over.wait()
        if outcome.exception() is None:
            raise
    try:
        return outcome.result()
    finally:
        del outcome, work  # no cycle of the error, its traceback and this frame


async def _wait(over: anyio.Event) -> None:
    # In a notebook, an interrupt adds a callback to the loop from a signal handler, which does not wake a loop that waits:
    # ipykernel's _cancel_on_sigint. Nothing else may wake it before the thread ends.
    while in_notebook() and not over.is_set():
        with anyio.move_on_after(_WAKE):
            await over.wait()
    await over.wait()


def _work(function: Callable[[], T], outcome: Future[T], call_soon: CallSoon, over: anyio.Event) -> None:
    note_outcome(outcome, function)
    with suppress(RuntimeError):  # the loop has ended and with it the task
        call_soon(over.set)


# ---------------------------------------------------------------------------------------------------- context variables

handling: ContextVar[object] = ContextVar("trainbus_handling", default=None)
"""Identifies the runtime in its async handlers, and in all that they start."""


def set_library(context: Context, library: str | None) -> None:
    """Have ``sniffio``, which anyio asks, find this event loop in ``context``, whichever it was copied from."""
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        context.run(sniffio.current_async_library_cvar.set, library)


@types.coroutine
def await_through(take_step: Callable[..., Any], coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Await it with every step made by ``take_step(function, value)``, such as ``Context.run``, at less than a task costs."""
    step, value = coroutine.send, None
    while True:
        try:
            yielded = take_step(step, value)
        except StopIteration as done:
            return done.value
        try:
            step, value = coroutine.send, (yield yielded)
        except GeneratorExit:
            take_step(coroutine.close)
            raise
        except BaseException as error:  # noqa: BLE001 - a cancellation, say: it is the coroutine's to see
            step, value = coroutine.throw, error
