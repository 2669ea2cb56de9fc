"""Train in the background of a web server: a live page with the loss, and buttons that control the run.

    pip install -e ".[demo,web]" && python examples/serve.py        # then open http://127.0.0.1:8000

The server and the bus share one event loop; training has a thread of its own, so pages are served while it computes. What the
page shows comes from ``bus.stream(...)`` and goes out as server-sent events. Its buttons call ``loop.pause()``, ``resume()``,
``set_lr()``, ``checkpoint_now()`` and ``stop()``, each of which takes effect at the next safe mount point of the run.

Other pages that are open in the visitor's browser can neither read the run nor reach into it: requests have to name a host that
is known to be this one (no name that is rebound to it), and those of pages to come from ours. What a request brings is bounded.
The server asks for no password and anyone who reaches its address can stop the run, so it listens on this machine only.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from torch.utils.data import DataLoader

from hooks.demo import Accuracy, digits, network, step
from trainbus import (
    BeforeRun,
    Bus,
    CheckInvalidLossHook,
    CheckpointHook,
    EMAHook,
    OptimizerHook,
    RuntimeInfoHook,
    TrainLoop,
    get_logger,
)

PAGE = Path(__file__).with_name("serve.html")

log = get_logger()


class Bulletin:
    """What visitors are told, numbered. Everyone reads at their own speed, and who comes late reads from the beginning.

    Used in the server's event loop only.
    """

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._bell = anyio.Event()
        self._over = False

    def post(self, kind: str, *, last: bool = False, **data: Any) -> None:
        """Add a message; after the last one, readers leave."""
        number = len(self._messages)
        self._messages.append(f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode())
        self._over = last
        self._bell.set()
        self._bell = anyio.Event()

    async def read(self, start: int = 0) -> AsyncIterator[bytes]:
        """Yield the messages from number ``start`` on, as server-sent events, and a sign of life when there are none."""
        while True:
            while start < len(self._messages):
                yield self._messages[start]
                start += 1
            if self._over:
                return
            bell = self._bell
            with anyio.move_on_after(10) as quiet:
                await bell.wait()
            if quiet.cancelled_caught:
                yield b": still here\n\n"


class Trainer:
    """The digits job, its bus, and what it has to tell."""

    def __init__(self, work_dir: Path, *, epochs: int = 60, pace: float = 0.0) -> None:
        torch.manual_seed(0)
        data = {name: DataLoader(part, batch_size=32, shuffle=name == "train") for name, part in digits(seed=0).items()}
        model = network()
        self.work_dir = work_dir
        self.bulletin = Bulletin()
        self.over = False
        self._ending = False
        self._paused = False
        self._lr = 1e-3
        self.bus = Bus()
        self.bus.on("before_run", self._begin, priority=0)
        self.bus.on("before_train_iter", lambda event: time.sleep(pace))
        self.bus.add(
            OptimizerHook(grad_clip=5.0),
            EMAHook(momentum=0.02),
            RuntimeInfoHook(),  # reports the learning rate
            CheckInvalidLossHook(),
            CheckpointHook(save_best="accuracy"),
        )
        self.loop = TrainLoop(
            model,
            torch.optim.AdamW(model.parameters(), lr=self._lr, weight_decay=1e-2),
            step=step,
            train_data=data["train"],
            val_data=data["val"],
            metrics={"accuracy": Accuracy()},
            bus=self.bus,
            max_epochs=epochs,
            work_dir=work_dir,
            seed=0,
        )

    async def train(self) -> None:
        """Train, posting what happens on the bulletin, until it is over one way or the other."""
        self.bulletin.post("hello", epochs=self.loop.max_epochs, work_dir=str(self.work_dir))
        state, message = "finished", ""
        async with anyio.create_task_group() as readers:
            try:
                async with self.bus:  # when it closes the streams end, and with them the readers
                    for post, events in self._streams():
                        readers.start_soon(_post_all, events, post)
                    await self.loop.arun()
                if self.stopped:
                    state = "stopped"
            except Exception as error:
                log.exception("training failed; the server goes on")
                state, message = "failed", f"{type(error).__name__}: {error}"
        self.over = True
        self.bulletin.post("over", last=True, state=state, message=message, iter=self.loop.counters.iter)

    @property
    def stopped(self) -> bool:
        """True if the run has ended before its time."""
        return self.loop.counters.epoch < (self.loop.max_epochs or 0)

    def pause(self, paused: bool = True) -> None:
        """Hold the run after the iteration under way, or let it go on."""
        (self.loop.pause if paused else self.loop.resume)()
        self._paused = paused
        self._tell()

    def set_lr(self, lr: float) -> None:
        """Train on with this learning rate."""
        self.loop.set_lr(lr)
        self._lr = lr
        self._tell()

    def stop(self) -> None:
        """End the run in order, also one that is paused or has not begun."""
        self._ending = True
        self.loop.stop("asked for by a visitor")

    def _begin(self, event: BeforeRun) -> None:
        """Do what was asked for before there was a run."""
        if self._ending:
            event.run.stop()
        if self._paused:
            event.run.pause()

    def _tell(self) -> None:
        self.bulletin.post("changed", paused=self._paused, lr=self._lr, iter=self.loop.counters.iter)

    def _streams(self) -> Iterator[tuple[Callable[[Any], None], AsyncIterator[Any]]]:
        yield self._post_scalars, self.bus.stream("after_train_iter", every=2, queue=1000, full="drop_old")
        yield self._post_metrics, self.bus.stream("after_val_epoch")
        yield self._post_checkpoint, self.bus.stream("checkpoint_committed")

    def _post_scalars(self, event: Any) -> None:
        numbers = {name: value for name, value in event.outputs.items() if math.isfinite(value)}
        self.bulletin.post("scalars", iter=event.progress.iter + 1, epoch=event.progress.epoch + 1, **numbers)

    def _post_metrics(self, event: Any) -> None:
        self.bulletin.post("metrics", iter=event.progress.iter, **event.metrics)

    def _post_checkpoint(self, event: Any) -> None:
        names = [Path(name).name for name in event.names]
        self.bulletin.post("checkpoint", names=names, bytes=event.bytes, seconds=event.seconds)


async def _post_all(events: AsyncIterator[Any], post: Callable[[Any], None]) -> None:
    async for event in events:
        post(event)


# ---------------------------------------------------------------------------------------------------------- the server


class Rate(msgspec.Struct):
    """What a visitor sends to set the learning rate."""

    lr: Annotated[float, msgspec.Meta(gt=0, lt=1)]


class OwnPagesOnly:
    """Refuses commands that a page of another site sends through the visitor's browser, which says so by ``Origin``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what asks for nothing to be changed, what comes from our page, and what comes from no page (curl)."""
        headers = Headers(scope=scope) if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD") else Headers()
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            response = JSONResponse({"error": "commands are taken from the page of this server only"}, status_code=403)
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)


async def _short_body(request: Request, most: int = 256) -> bytes:
    """Return the body of a request if it is short, and does not take its time."""
    body = b""
    try:
        with anyio.fail_after(5):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise HTTPException(413, f"a command has at most {most} bytes")
    except TimeoutError:
        raise HTTPException(408, "the request did not come within 5 seconds") from None
    except ClientDisconnect:
        raise HTTPException(400, "the request was cut off") from None
    return body


def make_app(trainer: Trainer, hosts: Sequence[str] = ()) -> Starlette:
    """Return the application; it trains from its start on, and ends the run in order when it is shut down.

    Args:
        trainer: what it trains.
        hosts: further names of this machine, beside those of the local one.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.train)
            try:
                yield
            finally:
                trainer.stop()

    async def page(request: Request) -> Response:
        headers = {"X-Frame-Options": "DENY"}  # nor may another page show it and have its buttons pressed
        return HTMLResponse(await anyio.Path(PAGE).read_text(), headers=headers)

    async def events(request: Request) -> Response:
        seen = request.headers.get("last-event-id", "")  # a browser that lost the connection says what it had
        start = int(seen) + 1 if seen.isdecimal() and len(seen) < 10 else 0
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(trainer.bulletin.read(start), media_type="text/event-stream", headers=headers)

    async def command(request: Request) -> Response:
        if trainer.over:
            return JSONResponse({"error": "training is over"}, status_code=409)
        match request.path_params["command"]:
            case "pause":
                trainer.pause()
            case "resume":
                trainer.pause(False)
            case "checkpoint":
                trainer.loop.checkpoint_now()
            case "stop":
                trainer.stop()
            case _:
                return JSONResponse({"error": "no such command"}, status_code=404)
        return Response(status_code=202)  # accepted: it takes effect at the next safe mount point, and events will tell

    async def learning_rate(request: Request) -> Response:
        try:
            rate = msgspec.json.decode(await _short_body(request), type=Rate)
        except msgspec.DecodeError as error:
            message = f'a learning rate is a number between 0 and 1, such as {{"lr": 0.001}}: {error}'
            return JSONResponse({"error": message}, status_code=422)
        trainer.set_lr(rate.lr)
        return Response(status_code=202)

    known = ["127.0.0.1", "localhost", "[::1]", "::1", *hosts]
    return Starlette(
        lifespan=lifespan,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=known, www_redirect=False), Middleware(OwnPagesOnly)],
        routes=[
            Route("/", page),
            Route("/events", events),
            Route("/lr", learning_rate, methods=["POST"]),
            Route("/{command}", command, methods=["POST"]),
        ],
    )


class Server(uvicorn.Server):
    """Ends the run when it is told to end itself: pages that listen to the run would keep it waiting otherwise.

    It closes the connections of visitors who do not read after ``patience`` seconds.
    """

    def __init__(self, trainer: Trainer, host: str = "127.0.0.1", port: int = 8000, *, patience: int = 5) -> None:
        config = uvicorn.Config(
            make_app(trainer, [host, socket.gethostname()]),
            host=host,
            port=port,
            log_level="warning",
            ws="none",
            limit_concurrency=100,
            timeout_graceful_shutdown=patience,
        )
        super().__init__(config)
        self.trainer = trainer

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where the page is, once it is there."""
        await super().startup(sockets)
        host, port, *_ = next(one.getsockname() for server in self.servers for one in server.sockets)
        log.info("training behind a page", url=f"http://{host}:{port}", work_dir=str(self.trainer.work_dir))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """On Ctrl-C or SIGTERM; in the event loop, not in the signal handler, where an Event's lock must not be taken."""
        self.trainer.stop()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # of a visitor who does not read: closing would wait until all is sent


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description="Trains on handwritten digits behind a live page.")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on; others can reach into the run then, if not local")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds to wait before each iteration (to be watched)")
    parser.add_argument("--out", type=Path, default=Path(f"runs/serve-{time.strftime('%Y%m%d-%H%M%S')}"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is too small for more, and the server needs a core, too
    trainer = Trainer(options.out, epochs=options.epochs, pace=options.pace)
    with suppress(KeyboardInterrupt):  # uvicorn passes it on when it has shut down in order
        Server(trainer, options.host, options.port).run()


if __name__ == "__main__":
    main()
