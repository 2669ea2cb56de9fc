"""A web application that trains: start, watch, pause and stop trainings by requests, each with a page of its own.

    pip install -e ".[demo,web]" fastapi && python examples/serve.py        # then open the address that it prints

    curl -H "$AUTH" localhost:8000/trainings -d '{"name": "first", "epochs": 50}' -H "Content-Type: application/json"
    curl -H "$AUTH" localhost:8000/trainings                                # all of them, with their states
    curl -H "$AUTH" -N localhost:8000/trainings/first/events                # a stream
    curl -H "$AUTH" -X POST localhost:8000/trainings/first/pause            # or resume, save, stop

with AUTH="Authorization: Bearer $TOKEN". Behind a proxy or in a container, set HOST=0.0.0.0 and TOKEN.

Trainings wait for each other, because the runs of a process share its random state (and its GPU).

SIGTERM, as from Kubernetes, ends the streams, saves the training and exits with 75 if one is not finished, else with 0. The
application goes on with those when it starts again.
"""

import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
import torch
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field
from rich.console import Console

from trainbus.demo import make_loop
from trainbus.eventloop import TrainingError, TrainLoop, get_logger
from trainbus.events import AfterRun, BeforeRun, BeforeTrain, RunPaused, RunResumed
from trainbus.observe.dashboard import Watcher
from trainbus.observe.dashboard import app as dashboard_of

log = get_logger()
port, out = sys.argv[1:] or ("8000", "runs/serve")
token = os.environ.get("TOKEN") or secrets.token_urlsafe(24)
pages = dashboard_of(token=token, hosts=["*"])  # nothing is shown without the token, so any host name may be allowed


class Request(BaseModel):
    """What a client asks for."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,40}$")
    epochs: int = Field(20, ge=1)


class Training:
    """A training in the background. Its file ``request.json`` stays until it is finished, failed or stopped by a client."""

    def __init__(self, request: Request) -> None:
        self.request, self.state, self.failure = request, "waiting", ""
        self.reason = ""  # why it shall stop
        self.folder = Path(out) / request.name
        self.loop: TrainLoop | None = None

    async def run(self) -> None:
        try:
            async with application.state.turn:
                if self.state == "waiting":  # and not stopped meanwhile
                    loop = await anyio.to_thread.run_sync(self.make)  # it reads data
                    await loop.arun(resume="auto")
        except Exception as error:  # it would end the other trainings, and the server
            self.state, self.failure = "failed", repr(error)
            log.exception("a training has failed", training=self.request.name)
        if not (application.state.ends and self.state == "stopped"):
            self.file.unlink(missing_ok=True)

    def keep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self.request.model_dump_json())

    def make(self) -> TrainLoop:
        loop = make_loop(self.folder, self.request.epochs, seed=0, console=Console(stderr=True, quiet=True))
        loop.bus.drain_timeout = 10.0  # seconds; less than Kubernetes waits before it kills
        loop.bus.add(Watcher(pages.board))
        loop.bus.on("before_run", "before_train", "run_paused", "run_resumed", "after_run")(self.note)
        self.loop = loop
        return loop

    def note(self, event: Any) -> None:
        """Keep the state of the run; called on the thread that trains."""
        match event:
            case BeforeRun() if self.reason:  # it was to stop before there was a run
                event.run.stop(self.reason)
            case BeforeTrain() | RunResumed():
                self.state = "running"
            case RunPaused():
                self.state = "paused"
            case AfterRun():
                self.state = "stopped" if event.stopped else "finished"

    def stop(self, reason: str) -> None:
        self.reason = reason  # first, for a run that begins meanwhile
        if self.loop is None:
            self.state = "stopped"
        else:
            with suppress(TrainingError):  # the run has not begun, or has ended
                self.loop.save()
                self.loop.stop(reason)

    @property
    def file(self) -> Path:
        return self.folder / "request.json"

    @property
    def over(self) -> bool:
        return self.state in ("finished", "stopped", "failed")

    def facts(self) -> dict[str, Any]:
        facts = {**self.request.model_dump(), "state": self.state, "failure": self.failure, "epoch": 0, "iter": 0, "best": None}
        if self.loop is not None:
            facts |= {"epoch": self.loop.counters.epoch, "iter": self.loop.counters.iter}
            facts["best"] = None if (best := self.loop.best) is None else {"score": best.score, "path": str(best.path)}
        return facts


trainings: dict[str, Training] = {}


def unfinished() -> list[Request]:
    """The trainings that an earlier process left."""
    return [Request.model_validate_json(file.read_text()) for file in sorted(Path(out).glob("*/request.json"))]


async def begin(request: Request) -> Training:
    made = trainings[request.name] = Training(request)
    try:
        await anyio.to_thread.run_sync(
            made.keep
        )  # before the answer: what was promised outlives a kill, in the order of requests
    except BaseException:
        del trainings[request.name]
        raise
    application.state.tasks.start_soon(made.run)
    return made


@asynccontextmanager
async def lifespan(application: FastAPI) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        application.state.tasks, application.state.turn = tasks, anyio.Lock()
        for request in await anyio.to_thread.run_sync(unfinished):
            await begin(request)
        log.info(f"the trainings' pages are at http://127.0.0.1:{port}/training/#token={token}")
        yield
        application.state.ends = True
        for one in trainings.values():
            if not one.over:
                one.stop("the server ends")
    # Here all trainings have ended and their checkpoints are on disk.


# ------------------------------------------------------------------------------------------------------- the requests


async def check_token(given: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]) -> None:
    if not secrets.compare_digest(given.credentials.encode(), token.encode()):
        raise HTTPException(401, "wrong token")


async def known(name: str) -> Training:
    if name not in trainings:
        raise HTTPException(404, f"there is no training {name!r}")
    return trainings[name]


async def at_work(training: Annotated[Training, Depends(known)]) -> TrainLoop:
    if training.over or training.loop is None:
        raise HTTPException(409, f"training {training.request.name!r} is {training.state}")
    return training.loop


Known = Annotated[Training, Depends(known)]
AtWork = Annotated[TrainLoop, Depends(at_work)]
api = APIRouter(prefix="/trainings", dependencies=[Depends(check_token)])


@api.post("", status_code=201)
async def start(request: Request) -> dict[str, Any]:
    """Start a training, or go on with the one of this name; ``epochs`` counts those that are done."""
    if request.name in trainings and not trainings[request.name].over:
        raise HTTPException(409, f"training {request.name!r} is {trainings[request.name].state}")
    return (await begin(request)).facts()


@api.get("")
async def all_of_them() -> list[dict[str, Any]]:
    return [one.facts() for one in trainings.values()]


@api.get("/{name}")
async def one_of_them(training: Known) -> dict[str, Any]:
    return training.facts()


@api.get("/{name}/events")
async def events(loop: AtWork) -> StreamingResponse:
    """Stream each tenth iteration; a slow reader misses the oldest."""

    async def lines() -> AsyncIterator[str]:
        async with loop.bus.stream("after_train_iter", every=10, queue=100) as stream:
            async for event in stream:
                yield f"data: {event.to_json().decode()}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


@api.post("/{name}/stop", status_code=202)
async def stop(training: Known) -> None:
    """Save, and stop at the next safe mount point of the run."""
    if not training.over:
        training.stop("stopped by a client")


@api.post("/{name}/{command}", status_code=202)
async def command(loop: AtWork, command: Literal["pause", "resume", "save"]) -> None:
    """Ask for something; it happens at the next safe mount point of the run."""
    try:
        {"pause": loop.pause, "resume": loop.unpause, "save": loop.save}[command]()
    except TrainingError as error:  # the run has not begun, or has ended
        raise HTTPException(409, str(error)) from error


application = FastAPI(lifespan=lifespan)
application.state.ends = False


@application.get("/health")
async def health(response: Response) -> dict[str, Any]:
    failures = {one.request.name: one.failure for one in trainings.values() if one.failure}
    response.status_code = 503 if failures else 200
    return {"failures": failures}


application.include_router(api)
application.mount("/training", pages)


def leave(*_: object) -> None:
    sys.exit(75 if any(one.state == "stopped" and one.file.exists() for one in trainings.values()) else 0)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    signal.signal(signal.SIGTERM, leave)  # uvicorn calls it when all has ended
    uvicorn.run(application, host=os.environ.get("HOST", "127.0.0.1"), port=int(port), timeout_graceful_shutdown=5)
    leave()
