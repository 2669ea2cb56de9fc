"""The folder of temporary files, with the ways to save there."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from benchmarks import saving
from benchmarks.peers import Saver, Savers, handwritten, load, trainbus

PEERS = ("distributed", "lightning", "safetensors")
WAYS = ("DCP", "DCP async, thread", "Lightning AsyncCheckpointIO", "safetensors")


@dataclass(frozen=True)
class Disk:
    """A place for saves: a directory."""

    directory: Path
    title: ClassVar[str] = "a disk"
    floor: ClassVar[str] = saving.RAW
    """The way that only moves as many bytes."""
    reference: ClassVar[str] = "torch.save + fsync"
    """The way of plain PyTorch."""
    promised: ClassVar[bool] = False
    """Whether the design promises the time until a save is durable."""
    more: ClassVar[int] = 3
    """Times as many saves: they are short, and a disk is slow now and then."""

    def ways(self) -> tuple[Mapping[str, Savers], Mapping[str, str]]:
        """Return all ways to save here, and the reasons for the peers that are left out."""
        modules, left_out = load(PEERS)
        found: dict[str, Savers] = {self.floor: raw, **trainbus.SAVERS, **handwritten.SAVERS}
        for module in modules.values():
            found |= {name: way for name, way in module.SAVERS.items() if name in WAYS}
        return found, left_out

    def enter(self) -> None:
        """Do nothing: each process can reach it."""

    def where(self, number: int) -> Path:
        return self.directory / f"save_{number}"

    sync = staticmethod(saving.sync)
    bytes = staticmethod(saving.on_disk)
    remove = staticmethod(saving.remove)


def payload(model: nn.Module) -> bytes:
    """Return as many bytes as the weights of a model have."""
    return torch.ones(sum(weight.nbytes for weight in model.parameters()), dtype=torch.uint8).numpy().tobytes()


@contextmanager
def raw(model: nn.Module, _: Path) -> Iterator[Saver]:
    """Write as many bytes, on a thread."""
    data, pending = payload(model), list[Future[int]]()
    with ThreadPoolExecutor(1) as pool:

        def save(path: Path) -> None:
            pending.append(pool.submit(path.write_bytes, data))

        yield Saver(save, lambda _: model.parameters(), lambda: pending.pop().result(), background=True)
