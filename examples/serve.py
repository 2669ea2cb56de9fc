"""Train inside a web application, with the dashboard of the run mounted in it.

    pip install -e ".[demo,web]" && python examples/serve.py        # then open http://127.0.0.1:8000/training/

Without an application, the hook ``Dashboard()`` serves it beside a script: ``trainbus run examples/digits.toml --dashboard``.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from eventloop import get_logger
from eventloop.observe.dashboard import app
from hooks.demo import make_loop

port, out = sys.argv[1:] or ("8000", "runs/serve")
loop = make_loop(Path(out), epochs=1000, seed=0, console=Console(stderr=True))


async def training() -> None:
    try:
        await loop.arun()
    except Exception as error:  # noqa: BLE001 - it would end the lifespan, while the server goes on
        web.state.failure = repr(error)
        get_logger().exception("the training has failed")


@asynccontextmanager
async def lifespan(web: Starlette) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(training)
        yield
        loop.stop("the server ends")


async def health(request: Request) -> JSONResponse:
    failure = web.state.failure
    return JSONResponse({"failure": failure}, status_code=200 if failure is None else 503)


web = Starlette(routes=[Route("/health", health)], lifespan=lifespan)
web.state.failure = None
# A real application asks here who its user is. This one listens on this machine only, and lets everyone in.
web.mount("/training", app(loop, may_change=lambda request: True))

if __name__ == "__main__":
    uvicorn.run(web, port=int(port))
