"""``Dashboard``: watch and control a run in the browser, served beside the script."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import NoneType
from typing import Annotated, ClassVar

from msgspec import Meta

from trainbus.eventloop import Priority, check_options, events, get_logger, mount
from trainbus.eventloop.registry import register
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.options import Name
from trainbus.observe.dashboard import Board, HostNames, Server, Watcher, check_address
from trainbus.observe.settings import settings_of

log = get_logger()

Port = Annotated[int, Meta(ge=0, le=65535, description="a port from 1 to 65535, or 0 for any")]


@register
class Dashboard(CopiedAnew, Watcher):
    """Serve a page with live curves, costs, lanes, checkpoints and events of the run, and buttons that control it.

    The server has a thread of its own, and begins with the run; its address is logged once. It shows every run in this process
    that has this hook with the same port, and ends with the program. The address carries a token, which is needed to pause,
    resume or stop the run, to save a checkpoint or to set the learning rate. On this machine, the page can be seen without it.

    To serve the page from your own web application, use :func:`trainbus.observe.dashboard.app`.

    Args:
        port: port of the page; 0 for any. By default 8000 or, if that is taken, any.
        host: address to listen on; by default only this machine can reach it.
        token: at least 16 characters; needed for any other ``host``, where the page cannot be seen without it. By default a new
            one for each server.
        hosts: host names under which a proxy serves the page, such as ``"hub.example.com"``, or ``"*"`` for any. Then, too, the
            page cannot be seen without the token. Not needed with another ``host``, which answers to any name.
    """

    of_run: ClassVar = {"board": Board, "url": str, "pending_pages": deque, "_newest": NoneType, "_open": list}

    @check_options
    def __init__(
        self, port: Port | None = None, *, host: Name = "127.0.0.1", token: str | None = None, hosts: Sequence[Name] = ()
    ) -> None:
        super().__init__()
        check_address(host, token)
        HostNames(hosts)
        self._address = host, port, token, tuple(hosts)
        self.url = ""
        """The address of the page, once the run has begun."""

    def in_check(self) -> None:
        return None  # it is a server

    @mount(events.BeforeRun, priority=Priority.VERY_HIGH)
    def serve(self, event: events.BeforeRun) -> None:
        server = Server.at(*self._address)
        self.board = server.board
        if server.url != self.url:
            self.url = server.url
            log.info(f"the dashboard is at {self.url}")  # in the message: a value would stand in quotes

    @mount(events.BeforeTrain, priority=Priority.LOWEST)
    def note(self, event: events.BeforeTrain) -> None:
        """Keep the settings of the run: the list of runs has those that differ."""
        self.note_settings(settings_of(event.run, event.progress))
