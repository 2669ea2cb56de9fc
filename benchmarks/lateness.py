"""Measure how late a host's event loop is while ``await loop.arun()`` opens a bus, trains and closes, by the loop's own clock.

    python -m benchmarks.lateness [--rounds N]

A task asks to be woken each millisecond, and notes how much later it is. Beside it train, in turn: nothing; the same arithmetic
by hand, on a thread that the loop awaits; and a ``TrainLoop`` with inline, async and thread handlers and a stream. The second
shows what the machine and the GIL do. The CPU time is that of the loop's thread between two ticks: what trainbus does there.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec

import anyio
import anyio.lowlevel
import torch
import trio

from trainbus.eventloop import Bus, TrainLoop
from trainbus.eventloop.offload.loops import in_trio

TICK = 0.001  # seconds
STEPS = 400
Late = list[tuple[float, float]]
"""Seconds that each tick was late, and the CPU time of the loop's thread since the tick before."""


def clock() -> float:
    return trio.current_time() if in_trio() else asyncio.get_running_loop().time()


async def ticking(late: Late, over: list[bool]) -> None:
    spent = time.thread_time()
    while not over:
        due = clock() + TICK
        await anyio.sleep(TICK)
        now, cpu = clock(), time.thread_time()
        late.append((now - due, cpu - spent))
        spent = time.thread_time()


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    made = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    return made, torch.optim.SGD(made.parameters(), lr=0.01), [torch.randn(64, 256) for _ in range(STEPS)]


async def nothing() -> None:
    await anyio.sleep(1.0)


async def by_hand() -> None:
    module, optimizer, batches = model()

    def train() -> None:
        for batch in batches:
            optimizer.zero_grad()
            module(batch).mean().backward()
            optimizer.step()

    await (trio.to_thread.run_sync(train) if in_trio() else asyncio.to_thread(train))


async def trainbus() -> None:
    module, optimizer, batches = model()
    bus = Bus()
    bus.on("after_train_iter", lambda event: None)
    bus.on("after_train_iter", lambda event: time.sleep(0.0001), offload="thread", full="drop_old")

    @bus.on("after_train_iter")
    async def ship(event: object) -> None:
        await anyio.lowlevel.checkpoint()

    stream = bus.stream("after_train_iter", every=10)
    loop = TrainLoop(module, optimizer, step=lambda net, batch: net(batch).mean(), train_data=batches, bus=bus, max_epochs=1)
    await loop.arun()
    async for _ in stream:
        continue


SUBJECTS: dict[str, Callable[[], Awaitable[None]]] = {"nothing": nothing, "by hand": by_hand, "trainbus": trainbus}


async def measured(subject: Callable[[], Awaitable[None]]) -> Late:
    late: Late = []
    over: list[bool] = []
    if in_trio():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ticking, late, over)
            await subject()
            over.append(True)
    else:
        ticks = asyncio.create_task(ticking(late, over))
        await subject()
        over.append(True)
        await ticks
    return late


def run(backend: str, subject: Callable[[], Awaitable[None]]) -> Late:
    if backend == "trio":
        return trio.run(measured, subject)
    factory = None
    if backend == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(measured(subject))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    backends = ["asyncio", *(["uvloop"] if find_spec("uvloop") else []), "trio"]
    late: dict[tuple[str, str], Late] = {(backend, name): [] for backend in backends for name in SUBJECTS}
    for _ in range(rounds):
        for backend, name in late:
            late[backend, name] += run(backend, SUBJECTS[name])
    print(f"{'':18}{'ticks':>8}{'p50':>8}{'p99':>8}{'worst':>8}{'over 10 ms':>12}{'worst CPU':>11}   ms")
    for (backend, name), ticks in late.items():
        lates, cpus = sorted(one for one, _ in ticks), [cpu for _, cpu in ticks]
        figures = (lates[len(lates) // 2], lates[len(lates) * 99 // 100], lates[-1])
        shown = "".join(f"{one * 1e3:8.2f}" for one in figures)
        over = sum(one > 0.01 for one in lates)
        print(f"{backend + ', ' + name:18}{len(ticks):8}{shown}{over:12}{max(cpus) * 1e3:11.2f}")


if __name__ == "__main__":
    main()
