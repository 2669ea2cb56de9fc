"""A DataLoader forks its workers in the middle of a run: on an open bus, with lanes, threads and an event loop."""

import os
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, Dataset

from eventloop import Bus, Event, TrainLoop
from eventloop.events import AfterTrainIter

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

EPOCHS, BATCHES = 2, 6


class Drawn(Event):
    """Published where a sample is drawn."""

    index: int


class Publishing(Dataset[torch.Tensor]):
    """Publishes from within ``__getitem__``, which is called in the workers."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.bus.publish(Drawn(index=index))
        return torch.full((4,), float(index))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), torch.zeros(len(batch), 1))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_forked_from_a_run_with_offloaded_handlers_neither_hang_nor_publish(tmp_path, persistent):
    bus = Bus()
    where = tmp_path / "heard"
    where.touch()

    def note(kind: str, event: object) -> None:
        with where.open("a") as file:
            file.write(f"{kind} {os.getpid()}\n")

    bus.on(Drawn, lambda event: note("drawn", event))
    bus.on(AfterTrainIter, lambda event: note("inline", event))
    in_thread = bus.on(AfterTrainIter, lambda event: note("thread", event), offload="thread")

    async def in_task(event: AfterTrainIter) -> None:
        note("task", event)

    as_task = bus.on(AfterTrainIter, in_task)
    model = nn.Linear(4, 1)
    loader = DataLoader(Publishing(bus), batch_size=2, num_workers=2, persistent_workers=persistent)
    loop = TrainLoop(
        model, torch.optim.SGD(model.parameters(), lr=0.01), step=loss, train_data=loader, bus=bus, max_epochs=EPOCHS
    )
    loop.run()

    heard = where.read_text().splitlines()
    # Once for each iteration, all in this process, and nothing of what the copies in the workers were told.
    expected = [f"{kind} {os.getpid()}" for kind in ("inline", "task", "thread") for _ in range(EPOCHS * BATCHES)]
    assert sorted(heard) == expected
    for subscription in (in_thread, as_task):
        assert subscription.stats.published == subscription.stats.delivered == EPOCHS * BATCHES
