"""A live dashboard: curves, costs, lanes, checkpoints and events of the runs in a process, and buttons that control them.

- Beside a script: ``bus.add(Dashboard())`` or ``trainbus run CONFIG --dashboard``.
- In your own Starlette or FastAPI application: ``application.mount("/training", app(loop))``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import ConfigurationError
from trainbus.observe.dashboard.addresses import OWN_NAMES, HostNames, check_address
from trainbus.observe.dashboard.folders import FolderWatcher
from trainbus.observe.dashboard.page import Board
from trainbus.observe.dashboard.server import Server, missing_web
from trainbus.observe.dashboard.watcher import Watcher

__all__ = ["Board", "FolderWatcher", "HostNames", "Server", "Watcher", "app", "check_address"]


@check_options
def app(
    *watched: Any,
    token: str | None = None,
    may_change: Callable[[Any], bool] | None = None,
    hosts: Collection[str] = OWN_NAMES,
) -> Any:
    """Return an ASGI application that shows the runs of loops and buses, to mount under any prefix.

        api = FastAPI()
        dashboard = app(loop, may_change=lambda request: request.user.is_admin, hosts=["train.example.com"])
        api.mount("/training", dashboard)

    Without ``token`` and ``may_change`` it is read-only. Everyone who can reach it sees the runs: to restrict that, mount it
    behind your application's authentication.

    Args:
        *watched: ``TrainLoop`` objects, runs or buses; each run on them has a page. Add them before their runs begin.
        token: a secret that permits changing a run; open a page with ``#token=...`` once.
        may_change: a function of the request that returns True if its sender may change a run.
        hosts: host names of the application, by default this machine's own: ``"train.example.com"``, ``"*.example.com"``.
            Requests for other names are refused, because any site can point a name of its own at this machine (DNS
            rebinding). ``"*"`` is any name; it needs ``token=``, without which nothing can be seen then.

    Raises:
        ConfigurationError: starlette is missing, an object has no bus, both ``token`` and ``may_change`` are given, or a name
            is not a host name.
    """
    if token is not None and may_change is not None:
        raise ConfigurationError("token= and may_change= exclude each other: give one of them")
    if token is not None:
        check_address("127.0.0.1", token)
    if HostNames(hosts).are_any and token is None:
        raise ConfigurationError(
            "hosts=['*'] would let any web site read the runs through a visitor's browser (DNS rebinding): list the host names "
            "of the application, or give token=, without which nothing can be seen then"
        )
    try:
        from trainbus.observe.dashboard.application import Application
        from trainbus.observe.dashboard.guard import Access
    except ImportError as error:
        raise missing_web(error) from None
    board = Board()
    for bus in dict.fromkeys(map(_bus_of, watched)):
        bus.add(Watcher(board))
    return Application(board, Access(token, may_change, hosts))


def _bus_of(watched: Any) -> Bus:
    bus = watched if isinstance(watched, Bus) else getattr(watched, "bus", None)
    if not isinstance(bus, Bus):
        raise ConfigurationError(f"app() takes TrainLoop, Run or Bus objects, not {watched!r}")
    return bus
