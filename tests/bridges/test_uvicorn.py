"""Streams of a bus in a uvicorn server, which waits for open responses before it tells the application that it ends."""

import signal

import anyio
import pytest

from trainbus.eventloop import Bus

from ..handlers import iteration

pytestmark = pytest.mark.anyio


async def test_a_stream_ends_when_the_uvicorn_server_of_its_process_shuts_down():
    uvicorn, bus = pytest.importorskip("uvicorn"), Bus()
    server = uvicorn.Server(uvicorn.Config("no:app", log_config=None))  # its default is for the whole process
    former = signal.signal(signal.SIGINT, server.handle_exit)  # as the server does while it serves
    try:
        async with bus:
            stream = bus.stream("after_train_iter")
            bus.publish(iteration(0))
            with anyio.fail_after(30):
                assert (await anext(stream)).batch_idx == 0
                signal.raise_signal(signal.SIGINT)
                assert [event async for event in stream] == []
    finally:
        signal.signal(signal.SIGINT, former)
