"""An S3 server of ``moto`` in a separate process.

The server is Python, and computes for most of the time that a client waits for. So it limits every way to save: the floor is a
plain PUT of as many bytes.
"""

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any, ClassVar
from urllib.request import Request, urlopen

import boto3
import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from torch import nn
from werkzeug.serving import WSGIRequestHandler, make_server

from benchmarks.peers import Saver, Savers, load, trainbus
from benchmarks.store_disk import payload

PEERS = ("obstore", "boto3", "s3fs", "distributed", "s3torchconnector", "lightning")
BUCKET = "bucket"
PLAIN = "plain PUT"
PATIENCE = 60  # seconds


@dataclass(frozen=True)
class Server:
    """A place for saves, with the methods of ``Disk``: the server at this address."""

    address: str
    title: ClassVar[str] = "an S3 server"
    floor: ClassVar[str] = PLAIN
    reference: ClassVar[str] = "torch.save + upload"
    promised: ClassVar[bool] = True
    more: ClassVar[int] = 1

    def ways(self) -> tuple[Mapping[str, Savers], Mapping[str, str]]:
        """Return all ways to save here, and the reasons for the peers that are left out."""
        modules, left_out = load(PEERS)
        found: dict[str, Savers] = {PLAIN: plain_put, **trainbus.STORES}
        for module in modules.values():
            found |= module.STORES
        return found, left_out

    def enter(self) -> None:
        """Point all clients of this process, none of which exists yet, to the server."""
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ.update(keys, AWS_ENDPOINT_URL=self.address, AWS_ALLOW_HTTP="true")

    def where(self, number: int) -> str:
        return f"s3://{BUCKET}/save_{number}"

    def sync(self, url: str) -> None:
        """Do nothing: what the server has accepted is durable."""

    def bytes(self, url: str) -> int:
        """Return the size of all files there."""
        files = s3fs.S3FileSystem()
        files.invalidate_cache()
        return int(files.du(url))

    def remove(self, url: str) -> None:
        s3fs.S3FileSystem().rm(url, recursive=True)


@contextmanager
def plain_put(model: nn.Module, _: str) -> Iterator[Saver]:
    """Send as many bytes by one request, on a thread."""
    data, client, pending = payload(model), boto3.client("s3"), list[Future[object]]()
    with ThreadPoolExecutor(1) as pool:

        def save(url: str) -> None:
            key = url.removeprefix(f"s3://{BUCKET}/")
            pending.append(pool.submit(client.put_object, Bucket=BUCKET, Key=key, Body=BytesIO(data)))

        yield Saver(save, lambda _: model.parameters(), lambda: pending.pop().result(), background=True)


class Silent(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


@contextmanager
def server() -> Iterator[Server]:
    """Start a server on a free port.

    Raises:
        RuntimeError: it does not answer within a minute.
    """
    processes = multiprocessing.get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=serve, args=(sender,), daemon=True)
    process.start()
    try:
        if not receiver.poll(PATIENCE):
            raise RuntimeError(f"the S3 server did not start within {PATIENCE} s")
        address = receiver.recv()
        urlopen(Request(f"{address}/{BUCKET}", method="PUT")).close()  # noqa: S310
        yield Server(address)
    finally:
        process.terminate()
        process.join()


def serve(ready: Connection) -> None:
    app = DomainDispatcherApplication(create_backend_app)
    listening = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Silent)
    ready.send(f"http://127.0.0.1:{listening.server_port}")
    listening.serve_forever()
