"""Replica groups for tests: a lighthouse, managers, and a training whose numbers tell which steps it has made."""

from datetime import timedelta

import torch
from torch import distributed, nn

TIMEOUT = timedelta(seconds=15)


def lighthouse(**options):
    """Return a server in which groups find each other; ``address()`` is for them."""
    from torchft.coordination import LighthouseServer

    return LighthouseServer(bind="[::]:0", **{"min_replicas": 1, "join_timeout_ms": 1000, "quorum_tick_ms": 50} | options)


def manager(replica_id, *, launched=False, **options):
    """Return the manager of a replica group: of one process, or of those that ``torchrun`` has ``launched``."""
    import torchft

    common = {"load_state_dict": None, "state_dict": None, "min_replica_size": 1}
    times = {"timeout": TIMEOUT, "quorum_timeout": TIMEOUT}
    place, store = {}, None
    if not launched:
        store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        place = {"rank": 0, "world_size": 1, "store_addr": "localhost", "store_port": store.port}
    group = torchft.ProcessGroupGloo(timeout=TIMEOUT)
    made = torchft.Manager(pg=group, replica_id=replica_id, **common | place | times | options)
    made.store = store  # the process with the store keeps it
    return made


class Net(nn.Module):
    """A small network with a dropout, and with a batch norm if wanted."""

    def __init__(self, *, norm: bool = False, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(rows)).relu()))


def rows(size: int = 80):
    """Return a data set of numbers, inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 4, generator=generator)
    return torch.utils.data.TensorDataset(torch.arange(size), inputs, inputs.sum(1, keepdim=True))
