"""A small training behind a dashboard on a real server, and a visitor of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from trainbus.eventloop import Bus, TrainingError
from trainbus.observe.dashboard import Server, Watcher

from ..failing import fails
from ..hooks.conftest import batches, make_loop
from ..waiting import until

DATA = batches(5)


class Job:
    """A training on a thread of its own. With ``slow`` it goes on until it is stopped."""

    def __init__(self, bus: Bus | None = None, *, epochs: int = 3, slow: bool = False, **options: Any) -> None:
        self.bus = Bus() if bus is None else bus
        if slow:
            epochs = 1_000_000
            options = {"val_interval": 200} | options  # or there would be hundreds of events a second
            self.bus.on("before_train_iter", lambda event: time.sleep(0.002))
        data = {"train_data": DATA, "val_data": DATA} | options
        self.loop = make_loop(bus=self.bus, max_epochs=epochs, **data)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._train, name="job")

    def _train(self) -> None:
        try:
            self.loop.run()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        while self.thread.is_alive():
            with suppress(TrainingError):  # the run has not begun, or has ended
                self.loop.stop()
            self.thread.join(0.1)


@contextmanager
def serving(host: str = "127.0.0.1", token: str | None = None, **options: Any) -> Iterator[Server]:
    server = Server(host, 0, token, **options)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def watched(server: Server, **options: Any) -> Iterator[Job]:
    """A training on the server's page 1."""
    job = Job(**options)
    job.bus.add(Watcher(server.board))
    with job:
        until(lambda: server.board.get(1) is not None)
        yield job


class Visitor:
    """A client with or without the token."""

    def __init__(self, server: Server, *, token: bool = True) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {server.token}"} if token else {}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=60, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    @contextmanager
    def told(self, page: int = 1, prefix: str = "", **headers: str) -> Iterator[Iterator[tuple[int, str, Any]]]:
        """The server-sent events of a page: an iterator of (number, kind, data)."""
        with self.client.stream("GET", f"{prefix}/runs/{page}/events", headers=headers) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield messages(response.iter_lines())

    def post(self, command: str, page: int = 1, **options: Any) -> Any:
        return self.client.post(f"/runs/{page}/{command}", **options)


@contextmanager
def failing(server: Server, message: str) -> Iterator[Job]:
    """A training on the server's page 1 that fails in its seventh iteration."""
    bus = Bus()
    bus.on("after_train_iter", fails(RuntimeError(message)), once=7)
    with watched(server, bus=bus) as job:
        yield job


def messages(lines: Iterator[str]) -> Iterator[tuple[int, str, Any]]:
    number, kind = 0, ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            number = int(value)
        elif name == "event":
            kind = value
        elif name == "data":
            yield number, kind, json.loads(value)


def wait_for(told: Iterator[tuple[int, str, Any]], wanted: str, **values: Any) -> Any:
    for _, kind, data in told:
        if kind == wanted and all(data[key] == value for key, value in values.items()):
            return data
    raise AssertionError(f"the stream ended without {wanted} {values}")
