"""anyio: a BlockingPortal into an event loop on another thread."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from anyio.from_thread import start_blocking_portal

from benchmarks.peers import HandOff, HandOffs, Receive


def offload() -> Mapping[str, HandOffs]:
    return {"anyio portal.start_task_soon": portal}


@contextmanager
def portal(receive: Receive) -> Iterator[HandOff]:
    async def handle(event: object) -> None:
        receive(event)

    with start_blocking_portal() as entrance:
        yield HandOff(partial(entrance.start_task_soon, handle))
