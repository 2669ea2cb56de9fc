"""Interleavings: an operation of a bus × a point of it × a call × who calls × an event loop.

A case makes a bus with inline, async and thread handlers, begins the operation, makes the call at the point, ends the
operation, closes the bus, and uses it once more. It is right if all of that ends, errors are those of trainbus, each event is
accounted for, and the last one is delivered to each handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.from_thread
import torch

from trainbus.eventloop import Bus, Event, Hook, TrainLoop
from trainbus.eventloop.errors import RunCancelled, TrainbusError
from trainbus.eventloop.offload import loops

from .points import Gate, Lines, Point, at_await

BACKENDS = ("asyncio", "uvloop", "trio")
BUSY = 0.03  # seconds that a handler waits for the point: the bus that closes waits for it
PATIENCE = 0.005  # seconds that an operation stops at a point


class Shot(Event):
    number: int = 0


class Last(Event):
    pass


class Tally(Hook):
    def after_run(self, event: Any) -> None: ...
    async def after_train_epoch(self, event: Any) -> None: ...


def inline(event: Any) -> None: ...


async def task(event: Any) -> None: ...


def thread(event: Any) -> None: ...


class Case(NamedTuple):
    operation: str
    point: Point | int  # a line, or the number of an await
    call: str
    caller: str
    backend: str

    def __str__(self) -> str:
        where = f"await {self.point}" if isinstance(self.point, int) else f"{Path(self.point[0]).name}:{self.point[1]}"
        if not isinstance(self.point, int):
            where += " (main thread)" if self.point[2] else " (other thread)"
        return f"{self.operation} at {where}: {self.call} by {self.caller}, {self.backend}"


class World:
    """The bus of a case, and what its handlers do."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.gate = Gate(PATIENCE)
        self.errors: list[BaseException] = []
        self.model = torch.nn.Linear(1, 1)
        self.bus = bus = Bus(backend="trio" if case.backend == "trio" else "asyncio", drain_timeout=5, abort_timeout=2)
        self.lasts: list[str] = []
        if case.operation not in ("first async handler", "first thread handler"):
            self.task, self.thread = bus.on(Shot, task), bus.on(Shot, thread, offload="thread")
            bus.on(Last, self._last_task)
            bus.on(Last, lambda event: self.lasts.append("thread"), offload="thread")
        else:
            self.task = self.thread = bus.on(Shot, lambda event: None)
        bus.on(Shot, inline)
        bus.on(Last, lambda event: self.lasts.append("inline"))
        self.handlers = len(bus.subscriptions)
        self._acts = {"inline handler": self._inline, "async handler": self._async, "thread handler": self._threaded}
        self.stepped: Callable[[], object] = lambda: None

    async def _last_task(self, event: Any) -> None:
        self.lasts.append("task")

    # ------------------------------------------------------------------------------------------------- the callers

    def call(self) -> None:
        """Make the call, here and now."""
        try:
            CALLS[self.case.call](self)
        except TrainbusError:
            pass  # it is refused there
        except BaseException as error:  # noqa: BLE001 - reported by the case
            self.errors.append(error)
        finally:
            self.gate.done.set()

    @contextlib.contextmanager
    def caller(self) -> Iterator[None]:
        """Have the caller ready on another thread, or busy in a handler."""
        kind = self.case.caller
        worker = None
        if kind in ("thread", "inline handler"):
            act = self.call if kind == "thread" else self._act_inline
            worker = threading.Thread(target=self._wait_and, args=(act,), daemon=True)
            worker.start()
        if kind == "inline handler":
            self.bus.on(Busy, self._inline)
        try:
            yield
        finally:
            self.gate.reached.set()
            if worker is not None:
                worker.join()

    def subscribe_caller(self) -> None:
        """Have a handler of an open bus make the call at the gate."""
        if self.case.caller == "async handler":
            self.bus.on(Busy, self._async)
        elif self.case.caller == "thread handler":
            self.bus.on(Busy, self._threaded, offload="thread")
        else:
            return
        self.bus.publish(Busy())

    def _wait_and(self, act: Callable[[], object]) -> None:
        self.gate.reached.wait()
        act()

    def _act_inline(self) -> None:
        with suppress(TrainbusError):
            self.bus.publish(Busy())

    def _inline(self, event: Any) -> None:
        self.call()

    async def _async(self, event: Any) -> None:
        with anyio.move_on_after(BUSY):
            while not self.gate.reached.is_set():
                await anyio.sleep(0.0005)
        self.call()

    def _threaded(self, event: Any) -> None:
        self.gate.reached.wait(BUSY)
        self.call()

    # ------------------------------------------------------------------------------------------------ the last word

    def check(self) -> None:
        """Raise AssertionError if the case is wrong; the bus is closed."""
        for error in self.errors:
            raise AssertionError(f"the call raised {error!r}") from error
        assert self.bus.state == "idle", self.bus.state
        for one, stats in self.bus.stats().items():
            assert not stats.pending, (one, stats)
        expected = {"inline", "task", "thread"} if len(self.lasts) > 1 else {"inline"}
        assert sorted(self.lasts) == sorted(expected), self.lasts


class Busy(Event):
    pass


def _drain(world: World) -> None:
    world.bus.drain(timeout=0.02)


def _spawn(world: World, function: Callable[[], Awaitable[object]]) -> None:
    """Await something in a task of the loop that runs here, or in a loop of this thread's own."""

    async def quiet() -> None:
        with suppress(TrainbusError):
            await function()

    if loops.in_trio():
        import trio

        trio.lowlevel.spawn_system_task(quiet)
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(quiet())
    else:
        kept.add(made := loop.create_task(quiet()))
        made.add_done_callback(kept.discard)


kept: set[Any] = set()


async def _read(world: World, **options: Any) -> None:
    async with world.bus.stream(Shot, **options) as stream:
        with anyio.move_on_after(0.01):
            async for _ in stream:
                break


def _watch(world: World) -> None:
    with world.bus.watch(world.model), world.bus.on("after_module_forward", inline):
        world.model(torch.zeros(1))


def _toggle(world: World) -> None:
    world.bus.timing = not world.bus.timing


CALLS: dict[str, Callable[[World], object]] = {
    "on": lambda world: world.bus.on(Shot, lambda event: None),
    "on async": lambda world: world.bus.on(Shot, task),
    "on thread": lambda world: world.bus.on(Shot, thread, offload="thread"),
    "off": lambda world: world.bus.off(inline),
    "add": lambda world: world.bus.add(Tally()),
    "keep": lambda world: world.bus.keep(Shot, last=3),
    "stream": lambda world: _spawn(world, lambda: _read(world)),
    "stream with replay": lambda world: _spawn(world, lambda: _read(world, replay=2)),
    "publish": lambda world: world.bus.publish(Shot()),
    "wants": lambda world: (world.bus.wants(Shot), world.bus.wants("before_run")),
    "cancel": lambda world: world.task.cancel(),
    "cancel thread": lambda world: world.thread.cancel(),
    "watch": _watch,
    "stats": lambda world: (world.bus.stats(), world.bus.describe(stats=True), world.bus.explain(Shot), repr(world.bus)),
    "timing": _toggle,
    "drain": _drain,
    "adrain": lambda world: _spawn(world, lambda: world.bus.adrain(timeout=0.02)),
    "close": lambda world: world.bus.close(),
    "aclose": lambda world: _spawn(world, world.bus.aclose),
    "open": lambda world: world.bus.open(),
}

CANCELS = ("scope", "task", "all tasks")

# ----------------------------------------------------------------------------------------------------------- operations


def _shoot(world: World) -> None:
    for number in range(3):
        world.bus.publish(Shot(number=number))


def _train(world: World) -> TrainLoop:
    model = world.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainLoop(
        model,
        optimizer,
        step=lambda model, batch: model(batch).mean(),
        train_data=[torch.zeros(1, 1)],
        bus=world.bus,
        max_epochs=1,
    )


class Operation(NamedTuple):
    """What is stopped. ``act`` returns an awaitable where the loop of the host runs the bus."""

    act: Callable[[World], Any]
    opened: bool  # the bus is open before
    hosted: bool


async def _opens(world: World) -> None:
    await world.bus.__aenter__()


async def _next(world: World, replay: int | None) -> None:
    async with world.bus.stream(Shot, replay=replay) as stream:
        _shoot(world)
        with anyio.move_on_after(0.1):
            async for _ in stream:
                break


async def _arun(world: World) -> None:
    with suppress(RunCancelled):
        await _train(world).arun()


async def _adrain(world: World) -> None:
    _shoot(world)
    await world.bus.adrain(timeout=1)


def _first_async(world: World) -> None:
    world.bus.on(Shot, task)
    _shoot(world)


def _first_thread(world: World) -> None:
    world.bus.on(Shot, thread, offload="thread")
    _shoot(world)


def _subscriptions(world: World) -> None:
    world.bus.on(Shot, inline).cancel()
    world.bus.wants(Shot)
    _shoot(world)


def _timing(world: World) -> None:
    _toggle(world)
    _shoot(world)
    _toggle(world)


async def _aclose(world: World) -> None:
    _shoot(world)
    await world.bus.aclose()


def _close(world: World) -> None:
    _shoot(world)
    world.bus.close()


def _drained(world: World) -> None:
    _shoot(world)
    world.bus.drain(timeout=1)


OPERATIONS: dict[str, Operation] = {
    "open": Operation(lambda world: world.bus.open(), opened=False, hosted=False),
    "close": Operation(_close, opened=True, hosted=False),
    "drain": Operation(_drained, opened=True, hosted=False),
    "timing on and off": Operation(_timing, opened=True, hosted=False),
    "first async handler": Operation(_first_async, opened=True, hosted=False),
    "first thread handler": Operation(_first_thread, opened=True, hosted=False),
    "subscriptions": Operation(_subscriptions, opened=True, hosted=False),
    "run": Operation(lambda world: _train(world).run(), opened=False, hosted=False),
    "aopen": Operation(_opens, opened=False, hosted=True),
    "aclose": Operation(_aclose, opened=True, hosted=True),
    "adrain": Operation(_adrain, opened=True, hosted=True),
    "stream": Operation(lambda world: _next(world, None), opened=True, hosted=True),
    "stream with replay": Operation(lambda world: _next(world, 2), opened=True, hosted=True),
    "arun": Operation(_arun, opened=False, hosted=True),
}


@contextlib.contextmanager
def _without_uvloop(without: bool) -> Iterator[None]:
    found = loops.find_spec
    if without:
        loops.find_spec = lambda name: None  # type: ignore[assignment]
    try:
        yield
    finally:
        loops.find_spec = found


def run(case: Case) -> None:
    """Run a case; raise AssertionError if something is wrong. It may hang."""
    operation = OPERATIONS[case.operation]
    world = World(case)
    if operation.hosted:
        _in_host(case.backend, lambda: _hosted(world, operation))
    else:
        with _without_uvloop(case.backend == "asyncio"):
            _own(world, operation)
    world.check()


def points(operation: str, backend: str) -> list[Point | int]:
    """Return the lines and the awaits of an operation, in their order."""
    found: list[Point | int] = []
    lines = Case(operation, -1, "wants", "nobody", backend)
    world = World(lines)
    counted = 0

    async def count() -> None:
        nonlocal counted
        counted = await _hosted(world, OPERATIONS[operation], found.append)

    if OPERATIONS[operation].hosted:
        _in_host(backend, count)
    else:
        with _without_uvloop(backend == "asyncio"):
            _own(world, OPERATIONS[operation], found.append)
    return [*found, *range(counted)]


def _own(world: World, operation: Operation, record: Callable[[Point], object] | None = None) -> None:
    case, bus = world.case, world.bus
    if operation.opened:
        bus.open()

    def at(point: Point) -> None:
        if record is not None:
            record(point)
        elif point == case.point:
            if case.caller == "signal handler":
                world.call()
            else:
                world.gate.stop()

    with world.caller():
        if operation.opened:
            world.subscribe_caller()
        with Lines(at):
            _quietly(world, lambda: operation.act(world))
    if bus.state != "idle":
        _quietly(world, bus.close)
    with bus:
        bus.publish(Last())


def _quietly(world: World, act: Callable[[], object]) -> None:
    try:
        act()
    except TrainbusError:
        pass
    except BaseException as error:  # noqa: BLE001 - reported by the case
        world.errors.append(error)


def _in_host(backend: str, main: Callable[[], Any]) -> None:
    if backend == "trio":
        import trio

        trio.run(main)
    elif backend == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    else:
        asyncio.run(main())


async def _hosted(world: World, operation: Operation, record: Callable[[Point], object] | None = None) -> int:
    """Run a case in the host's loop; return the number of awaits of the operation."""
    case, bus = world.case, world.bus
    call_soon = loops.threadsafe_call()
    scope = anyio.CancelScope()
    if operation.opened:
        await bus.__aenter__()

    def at(point: Point) -> None:
        if record is not None:
            record(point)
        elif point == case.point:
            if case.caller == "signal handler":
                world.call()
                return
            if case.caller == "task":
                call_soon(world.call)
            world.gate.stop()

    def at_wait() -> None:
        time.sleep(
            PATIENCE
        )  # another task keeps the loop busy, until the operation's thread comes to where it waits for the loop
        if case.call in CANCELS:
            _cancel(case.call, scope)
        else:
            world.call()

    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1

    async def act() -> None:
        try:
            made = operation.act(world)
            if record is not None:
                await _count_awaits(count, made)
            else:
                await at_await(case.point if isinstance(case.point, int) else -1, at_wait, made)
        except TrainbusError:
            pass
        except (anyio.get_cancelled_exc_class(), asyncio.CancelledError):
            if case.call not in CANCELS:
                raise
            if case.call == "scope":
                raise

    with world.caller():
        if operation.opened:
            world.subscribe_caller()
        with Lines(at) if not isinstance(case.point, int) or record is not None else contextlib.nullcontext():
            with scope:
                await act()
    forget = getattr(asyncio.current_task(), "uncancel", None) if case.backend != "trio" else None
    while forget is not None and asyncio.current_task().cancelling():  # type: ignore[union-attr]
        forget()
    while kept:
        await anyio.sleep(0.001)
    for _ in range(3):  # a task may have opened it meanwhile
        with suppress(TrainbusError):
            await bus.aclose()
        if bus.state == "idle":
            break
    async with bus:
        bus.publish(Last())
    return counted


async def _count_awaits(count: Callable[[], object], operation: Any) -> None:
    class Counting:
        def send(self, value: Any) -> Any:
            yielded = operation.send(value)
            count()
            return yielded

        def throw(self, error: BaseException) -> Any:
            yielded = operation.throw(error)
            count()
            return yielded

    await at_await(-1, lambda: None, Counting())  # type: ignore[arg-type]


def _cancel(kind: str, scope: anyio.CancelScope) -> None:
    if kind == "scope" or loops.in_trio():
        scope.cancel()
    elif kind == "task":
        asyncio.current_task().cancel()  # type: ignore[union-attr]
    else:
        for one in asyncio.all_tasks():
            one.cancel()


def cases(operations: Iterable[str], every: int = 1, seed: int = 0, calls: int = 1) -> list[Case]:
    """Return all cases of some operations, or one in ``every``, chosen by the ``seed``.

    At an await, each call is made. At a line, each caller makes so many ``calls``, other ones than at the line before.
    """
    found: list[Case] = []
    turn = itertools.cycle(CALLS)
    for backend in BACKENDS:
        for name in operations:
            operation = OPERATIONS[name]
            for point in points(name, backend):
                if isinstance(point, int):
                    found += [Case(name, point, call, "task", backend) for call in (*CALLS, *CANCELS)]
                else:
                    callers = _callers(operation, main=point[2])
                    found += [Case(name, point, next(turn), caller, backend) for caller in callers for _ in range(calls)]
    return found if every == 1 else random.Random(seed).sample(found, len(found) // every)


def _callers(operation: Operation, *, main: bool) -> list[str]:
    """Return who can make a call while the operation stops at a line."""
    found = ["thread", "inline handler"]
    if main:
        found.append("signal handler")
    elif operation.hosted:
        found.append("task")  # on the main thread, tasks run where the operation awaits
    if operation.opened:
        found.append("thread handler")
        if not (main and operation.hosted):
            found.append("async handler")
    return found
