"""Training inside a trio program, with a consumer beside it and a time limit: ``python examples/trio_app.py 5``.

``loop.arun()`` trains on a separate thread, so all other tasks in the nursery continue. If it is cancelled, the run ends at the
next safe mount point, and the cancellation continues. The bus closes after all published events are delivered.
"""

import sys
from collections.abc import AsyncIterator
from typing import Any

import torch
import trio
from torch import nn
from torch.nn.functional import mse_loss

from trainbus import Bus, TrainLoop


def make_loop(bus: Bus) -> TrainLoop:
    """Return a very long job: a network that learns y = sin(x)."""
    x = torch.linspace(-3, 3, 640).unsqueeze(1)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    return TrainLoop(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        step=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
        train_data=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.sin(x)), batch_size=64, shuffle=True),
        bus=bus,
        max_iters=10_000_000,
        seed=0,
    )


async def watch(events: AsyncIterator[Any]) -> None:
    """Print events slowly. Training does not wait, because the newest event replaces the one before."""
    async for event in events:
        print(f"iteration {event.progress.iter + 1:>6,}   loss {event.outputs['loss']:.5f}")
        await trio.sleep(0.25)


async def main(seconds: float) -> int:
    """Train for some seconds, and return the number of iterations."""
    bus = Bus()
    loop = make_loop(bus)
    async with trio.open_nursery() as nursery, bus:  # the bus ends first, with it the stream, and with that the watcher
        nursery.start_soon(watch, bus.stream("after_train_iter", every=20, queue=1, full="latest"))
        with trio.move_on_after(seconds):
            await loop.arun()
    return loop.counters.iter


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    done = trio.run(main, float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
    print(f"cancelled after {done:,} iterations")
