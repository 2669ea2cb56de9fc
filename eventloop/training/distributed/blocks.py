"""A store for each block of ranks, so that one process need not serve all of them.

The store of the process group is one process with one thread. Thousands of ranks that look for messages ten times a second
would keep it busy. Therefore the ranks form blocks, about as many as a block has ranks, and the first rank of each block serves
a store to it. Those of the first block, and the first ranks of the others, use the store of the process group.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainbus.eventloop.privates import default_store, tcp_store
from trainbus.eventloop.training.distributed.mailbox import Mailbox

BLOCK: Final = 64
"""Up to so many ranks form one block."""

_CONNECT: Final = timedelta(seconds=20)

_kept: tuple[Any, Any] | None = None
"""The store of the process group, and of this rank's block. Kept until this process ends, since others may use it as long."""


class Blocks:
    """Which ranks form the block of a rank, and which are the first ones of all blocks."""

    def __init__(self, rank: int, size: int) -> None:
        several = size > BLOCK and tcp_store(default_store()) is not None
        length = max(BLOCK, math.isqrt(size)) if several else size
        self.first = rank - rank % length
        """The first rank of this block."""
        self.members = range(self.first, min(self.first + length, size))
        self.firsts = range(0, size, length)
        self.leads = rank == self.first

    def join(self, far: Mailbox, name: str, ended: Callable[[], bool]) -> Mailbox | None:
        """Return the mailbox ``name`` of this block, or ``far``, the one of all ranks, for the first block.

        The other ranks of a block wait here for its first one, and call ``ended`` meanwhile. Returns None once that is True.

        Raises:
            RuntimeError, OSError: the store of the block cannot be reached.
        """
        global _kept
        if self.first == 0:
            return far
        group = default_store()
        if _kept is None or _kept[0] is not group:
            addresses, key = Mailbox("blocks"), str(self.first)
            if self.leads:
                store = TCPStore(_own_host(group), 0, is_master=True, wait_for_workers=False)
                addresses.put(key, (store.host, store.port))
            else:
                while not addresses.has(key):
                    if ended():
                        return None
                    time.sleep(0.02)
                host, port = addresses.get(tuple[str, int], key)[0]
                store = TCPStore(host, port, is_master=False, timeout=_CONNECT)
            _kept = group, store
        return Mailbox(name, _kept[1])


def _own_host(group: Any) -> str:
    """Return the address of this machine by which it reaches the process with the store."""
    tcp = tcp_store(group)
    with socket.create_connection((tcp.host, tcp.port)) as connection:
        return str(connection.getsockname()[0])
