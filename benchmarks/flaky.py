"""An S3 server behind a proxy with the faults of a network and of a busy store.

``with s3_server(Faults(...), seed=1) as store:`` runs ``moto_server`` in a process of its own and the proxy on a thread;
``store.url`` is the endpoint for a client, and ``store.counts`` tells how often each fault was injected. A request gets at most
one.
"""

import asyncio
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Self

PATIENCE = 30.0  # seconds for moto to start: it imports for some
PIECE = 1 << 16
ANSWERS = {"slow_down": ("503 Slow Down", "SlowDown"), "error": ("500 Internal Server Error", "InternalError")}
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: a close sends RST at once


@dataclass(frozen=True)
class Faults:
    """The share of the requests that get each fault, and the mean latency that is added to all, in seconds."""

    latency: float = 0.0
    slow_down: float = 0.0
    """Answered with 503 SlowDown."""
    error: float = 0.0
    """Answered with 500 InternalError."""
    reset: float = 0.0
    """The connection is reset in the middle of the request's body; of the answer, if the request has no body."""
    lost: float = 0.0
    """The server does what is asked, and the connection is reset before the answer."""

    def draw(self, rng: random.Random) -> str:
        """Return the name of a fault, or ``""``."""
        shares = {name: share for name, share in asdict(self).items() if name != "latency"}
        return rng.choices([*shares, ""], [*shares.values(), 1 - sum(shares.values())])[0]


class FlakyProxy:
    """A proxy in front of the HTTP server at ``port`` of this machine, which must close each connection after its answer."""

    def __init__(self, port: int, faults: Faults, seed: int = 0) -> None:
        self.faults = faults
        self.counts: Counter[str] = Counter()
        """Requests, and how many of them met which fault."""
        self._port, self._rng = port, random.Random(seed)
        self._down_until = 0.0
        self._clients: set[asyncio.StreamWriter] = set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="flaky proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def down(self, seconds: float) -> None:
        """Reset all connections, and each new one for so long."""
        self._down_until = time.monotonic() + seconds
        self._loop.call_soon_threadsafe(lambda: [_reset(client) for client in self._clients])

    def _serve(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._answer, sock=self._socket))
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self._clients.add(client)
        try:
            await self._pass_on(reader, client)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.counts["ended by a client"] += 1
        except asyncio.CancelledError:
            pass  # the proxy ends; the server of asyncio would report each request that did not
        finally:
            self._clients.discard(client)
            client.close()

    async def _pass_on(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.counts["requests"] += 1
        if time.monotonic() < self._down_until:
            self.counts["down"] += 1
            _reset(client)
            return
        if self.faults.latency:
            await asyncio.sleep(self._rng.expovariate(1 / self.faults.latency))
        fault = self.faults.draw(self._rng)
        if fault:
            self.counts[fault] += 1
        fields = _fields(head)
        if "transfer-encoding" in fields:
            raise NotImplementedError("the proxy passes on bodies with a Content-Length only")
        size = int(fields.get("content-length", 0))
        if "expect" in fields:
            client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault in ANSWERS:
            await reader.readexactly(size)
            client.write(_error(*ANSWERS[fault]))
            await client.drain()
            return
        upstream, server = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            server.write(b"".join(line for line in head.splitlines(keepends=True) if not line.lower().startswith(b"expect:")))
            await _relay(reader, server, size // 2 if fault == "reset" else size)
            if fault == "reset" and size:
                _reset(client)
            elif fault:
                answer = await upstream.read(-1)
                client.write(answer[: len(answer) // 2 if fault == "reset" else 0])
                await client.drain()
                _reset(client)
            else:
                while piece := await upstream.read(PIECE):
                    client.write(piece)
                    await client.drain()
        finally:
            server.close()


@contextmanager
def s3_server(faults: Faults, seed: int = 0) -> Iterator[FlakyProxy]:
    """Run ``moto_server``, and the proxy in front of it. The server has no bucket; it keeps all in memory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    moto = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(moto, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        _wait_until_open(server, port)
        with FlakyProxy(port, faults, seed) as proxy:
            yield proxy
    finally:
        server.kill()
        server.wait()


def _wait_until_open(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError('the S3 server does not start: pip install "moto[server]"')


def _fields(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _error(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> None:
    while size:
        piece = await reader.readexactly(min(size, PIECE))
        writer.write(piece)
        await writer.drain()
        size -= len(piece)


def _reset(client: asyncio.StreamWriter) -> None:
    client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.transport.abort()
