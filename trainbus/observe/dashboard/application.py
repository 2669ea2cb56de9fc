"""``Application``: the pages of a board, their events and their commands, as a Starlette application."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import anyio
import anyio.to_thread
import msgspec
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from trainbus.eventloop.errors import ConfigurationError, TrainbusError
from trainbus.eventloop.plain import as_json, encodable
from trainbus.observe import assets
from trainbus.observe.compared import differing
from trainbus.observe.dashboard.event_stream import EventStream, Readers
from trainbus.observe.dashboard.guard import Access, Guard, refused
from trainbus.observe.dashboard.page import Board, Command, CommandRefusedError, RunPage

_STATIC: Final = Path(__file__).with_name("static")
_SHARED: Final = Path(assets.__file__).parent
_FILES: Final = {
    **{name: _STATIC / name for name in ("dashboard.css", "common.js", "runs.js", "run.js", "charts.js", "several.js")},
    **{name: _SHARED / name for name in ("colours.css", "curves.js", "uplot.css", "uplot.js")},
}
_MOST_READERS: Final = 500
_MOST_SETTINGS: Final = 12  # columns
_MOST_CURVES: Final = 200  # runs in one answer
_BY_NUMBER: Final = orjson.OPT_NON_STR_KEYS
_MOST_BYTES: Final = 256
_BODY_SECONDS: Final = 5.0


def _curves(pages: list[tuple[RunPage, int]]) -> bytes:
    """Return the curves of runs that have more than the reader has."""
    news = [(page, page.messages.number) for page, seen in pages if page.messages.number > seen]
    return as_json({page.number: {"seen": number, "curves": page.curves()} for page, number in news}, None, _BY_NUMBER)


class _Rate(msgspec.Struct):
    """The request body that sets the learning rate."""

    lr: Annotated[float, msgspec.Meta(gt=0, lt=1000)]


class Application(Starlette):
    """The dashboard of the runs on a board. All its addresses are relative, so it can be mounted under any prefix.

    ``cut_off`` closes the connection of a stalled reader, given the client's address.
    """

    def __init__(self, board: Board, access: Access, cut_off: Callable[[Any], object] | None = None) -> None:
        self.board = board
        self._access = access
        self._cut_off = cut_off
        self._readers = Readers(lambda: board.closed)
        self._expose = _exposed(board)
        super().__init__(
            routes=[
                Route("/", self._list_page),
                Route("/runs.json", self._runs),
                Route("/curves.json", self._curves),
                Route("/runs/{number}", self._run_page),
                Route("/runs/{number}/", self._run_page),
                Route("/runs/{number}/events", self._events),
                Route("/runs/{number}/{command}", self._command, methods=["POST"]),
                Route("/static/{name}", self._static),
                Route("/metrics", self._metrics),
            ],
            middleware=[Middleware(Guard, access=access)],
        )

    async def _list_page(self, request: Request) -> Response:
        return FileResponse(_STATIC / "runs.html")

    async def _run_page(self, request: Request) -> Response:
        number = request.path_params["number"]
        if re.fullmatch(r"[0-9]+", number) is None:
            raise HTTPException(404)
        if not request.url.path.endswith("/"):
            # Starlette's own redirect has the whole address, which is another one in front of a proxy.
            return RedirectResponse(f"{number}/")
        return FileResponse(_STATIC / "run.html")

    async def _static(self, request: Request) -> Response:
        if (path := _FILES.get(request.path_params["name"])) is None:
            return refused(404, "unknown file")
        return FileResponse(path, headers={"cache-control": "no-cache"})

    async def _runs(self, request: Request) -> Response:
        pages = list(self.board)
        payload = {
            "runs": [page.summary() for page in pages],
            "settings": _settings(pages),
            "changes": self._access.mode,
            "may_change": self._access.allows(request),
        }
        return JSONResponse(encodable(payload), headers={"cache-control": "no-store"})

    async def _curves(self, request: Request) -> Response:
        """The curves of the runs in ``?runs=1:0,2:350``; the second number is the last one that the reader has of the run."""
        asked = re.findall(r"(\d{1,9}):(\d{1,15})(?:,|$)", request.query_params.get("runs", ""))[:_MOST_CURVES]
        pages = [(page, int(seen)) for number, seen in asked if (page := self.board.get(int(number))) is not None]
        body = await anyio.to_thread.run_sync(_curves, pages)  # in a thread, because it takes milliseconds for each run
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    async def _metrics(self, request: Request) -> Response:
        if isinstance(self._expose, str):
            return refused(404, self._expose)
        # In a thread, because it waits for the recorder's locks.
        body, kind = await anyio.to_thread.run_sync(self._expose, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind, "cache-control": "no-store"})

    async def _events(self, request: Request) -> Response | EventStream:
        page = self._page(request)
        seen = _seen(request)
        if page.messages.over and seen >= page.messages.number:
            return Response(status_code=204)  # 204 tells a browser's EventSource not to reconnect
        if self._readers.number >= _MOST_READERS:
            return refused(503, f"{_MOST_READERS} pages are open, which is the limit; close some")
        await anyio.to_thread.run_sync(page.files.refresh)  # in a thread, because it waits for the disk
        return EventStream(page.messages, seen, self._readers, self._cut_off)

    async def _command(self, request: Request) -> Response:
        page, command = self._page(request), request.path_params["command"]
        if command not in get_args(Command):
            return refused(404, f"{command[:40]!r} is not a command; the commands are {', '.join(get_args(Command))}")
        if not self._access.allows(request):
            return refused(403, _NOT_ALLOWED[self._access.mode])
        try:
            lr = msgspec.json.decode(await _short_body(request), type=_Rate).lr if command == "lr" else 0.0
        except msgspec.DecodeError as error:
            return refused(422, f'the learning rate must be above 0 and below 1000, such as {{"lr": 0.001}}: {error}')
        try:
            page.command(command, lr)
        except CommandRefusedError as error:
            return refused(409, str(error))
        except TrainbusError as error:
            return refused(422, str(error))
        return Response(status_code=202)  # it takes effect at the next safe mount point; the event stream says when

    def _page(self, request: Request) -> RunPage:
        number = request.path_params["number"]  # as text: int() refuses thousands of digits
        page = self.board.get(int(number)) if re.fullmatch(r"[0-9]{1,9}", number) else None
        if page is None:
            raise HTTPException(404, "unknown run; see the list of runs")
        return page


def _settings(pages: list[RunPage]) -> dict[str, dict[str, Any]]:
    """Return the settings in which runs differ: for each, its values by the number of the run."""
    names = [name for name in differing([dict(page.settings) for page in pages]) if name != "command"][:_MOST_SETTINGS]
    return {name: {str(page.number): page.settings[name] for page in pages if name in page.settings} for name in names}


_NOT_ALLOWED: Final = {
    "token": "changing a run needs the token: open the address that the dashboard logged at its start",
    "application": "the application does not allow you to change the run",
    "nobody": "this dashboard only shows the run; give app() token= or may_change= to control it",
}


def _exposed(board: Board) -> Callable[[str], tuple[bytes, str]] | str:
    """Return a function that renders the metrics of a board's runs; without prometheus-client, the reason."""
    try:
        from trainbus.observe.metrics import RunCollector, expose
    except ConfigurationError as error:
        return str(error)
    collector = RunCollector()
    board.collect = collector.add
    return partial(expose, collector)


def _seen(request: Request) -> int:
    """Return the number of the last message that a reader received, from its request."""
    said = request.headers.get("last-event-id", "")
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 16 else 0


async def _short_body(request: Request) -> bytes:
    """Return the body of a request; refuse a long or slow one."""
    body = b""
    try:
        with anyio.fail_after(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > _MOST_BYTES:
                    raise HTTPException(413, f"the request body is longer than {_MOST_BYTES} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the request body did not arrive within {_BODY_SECONDS:g} seconds") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client disconnected during the request") from None
    return body
