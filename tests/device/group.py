"""A process group of the simulated device: its collectives run on the CPU, by gloo."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed


class _Done(distributed.Work):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Group(distributed.ProcessGroup):
    """What DistributedDataParallel and trainbus need. A collective waits for the device."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return "simulated"

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        return self._on_host(self._gloo.allreduce, tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        return self._on_host(self._gloo.broadcast, tensors, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Done:
        hosts = [[one.cpu() for one in each] for each in outputs]
        self._gloo.allgather(hosts, [one.cpu() for one in inputs]).wait()
        for each, found in zip(outputs, hosts, strict=True):
            torch._foreach_copy_(each, found)
        return _Done(outputs)

    def _on_host(self, collective: Callable[..., Any], tensors: list[torch.Tensor], opts: Any) -> _Done:
        hosts = [one.cpu() for one in tensors]
        collective(hosts, *(() if opts is None else (opts,))).wait()
        torch._foreach_copy_(tensors, hosts)
        return _Done(tensors)
