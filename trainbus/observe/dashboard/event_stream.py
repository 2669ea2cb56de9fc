"""``EventStream``: send the messages of a run to one reader as server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import anyio
import anyio.lowlevel
from starlette.types import Receive, Scope, Send

from trainbus.eventloop.offload import server_ends
from trainbus.eventloop.seams import Seam
from trainbus.observe.dashboard.message_log import MessageLog

PACE: Final = 0.2  # seconds between two polls of the log with one reader
PACE_PER_READER: Final = 0.01
"""Seconds that each further reader adds, so that 200 readers load the interpreter no more than a few."""
QUIET: Final = Seam(10.0)  # seconds without a message after which a keep-alive is sent
PATIENCE: Final = Seam(20.0)  # seconds that a reader may take for one message before its connection is closed
_CHUNK: Final = 65536

_HEADERS: Final = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class Readers:
    """The number of readers of all runs of an application."""

    def __init__(self, is_closed: Callable[[], bool]) -> None:
        self.number = 0
        self.is_closed = is_closed

    @property
    def pace(self) -> float:
        """Seconds between two polls of the log."""
        return PACE + PACE_PER_READER * self.number


class EventStream:
    """An ASGI response that ends with the last message, when its server ends, or when the reader does not read.

    ``seen`` is the number of the last message that the reader received. ``cut_off`` closes a connection at once, given the
    client's address; None leaves it to the server.
    """

    def __init__(
        self, messages: MessageLog, seen: int, readers: Readers, cut_off: Callable[[Any], object] | None = None
    ) -> None:
        self._messages, self._seen, self._readers, self._cut_off = messages, seen, readers, cut_off
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send messages until the run, the server or the connection ends."""
        self._readers.number += 1
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, receive, tasks.cancel_scope)
                if not await self._send_all(send) and not self._gone and self._cut_off is not None:
                    self._cut_off(scope.get("client"))
                    await anyio.lowlevel.checkpoint()  # so that the server notices
                tasks.cancel_scope.cancel()
        finally:
            self._readers.number -= 1

    async def _send_all(self, send: Send) -> bool:
        """Send all messages; return False if the reader was too slow."""
        start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
        if not await self._sent(send, start):
            return False
        quiet = 0.0
        while True:
            ends = self._readers.is_closed() or server_ends()  # before the last read, which must see all earlier messages
            messages, self._seen, is_last = self._messages.read(self._seen)
            if not messages and quiet >= QUIET.value:
                messages = [b": still here\n\n"]
            for body in _chunks(messages):
                if not await self._sent(send, {"type": "http.response.body", "body": body, "more_body": True}):
                    return False
            if is_last or ends:
                break
            pace = self._readers.pace
            quiet = 0.0 if messages else quiet + pace
            await anyio.sleep(pace)
        return await self._sent(send, {"type": "http.response.body", "body": b""})

    async def _sent(self, send: Send, message: dict[str, Any]) -> bool:
        with anyio.move_on_after(PATIENCE.value) as patience:
            await send(message)
        return not patience.cancelled_caught

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self._gone = True
        scope.cancel()


def _chunks(messages: list[bytes]) -> list[bytes]:
    """Join messages to chunks that a slow connection can receive in time."""
    chunks = [b""]
    for one in messages:
        if chunks[-1] and len(chunks[-1]) + len(one) > _CHUNK:
            chunks.append(b"")
        chunks[-1] += one
    return [one for one in chunks if one]
