"""``Server``: serve a dashboard beside a script, on its own thread."""

from __future__ import annotations

import atexit
import secrets
import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

from trainbus.eventloop.errors import ConfigurationError, cannot_import
from trainbus.eventloop.seams import Seam
from trainbus.observe.dashboard.addresses import ANY_NAME, LOOPBACK, OWN_NAMES, check_address
from trainbus.observe.dashboard.page import Board

DEFAULT_PORT: Final = Seam(8000)
_GRACE: Final = 1  # seconds that pages have to receive the last messages when the program ends

SERVERS: Final[Seam[dict[tuple[str, int | None], Server]]] = Seam({})
"""The servers of this process, by host and requested port: hooks with the same values share one server."""
_lock = threading.Lock()


class Server:
    """A dashboard on a port, with the runs of this process. :meth:`at` starts it.

    It ends with the program, and delays neither a run nor the program by more than a second.
    """

    @classmethod
    def at(
        cls, host: str = "127.0.0.1", port: int | None = None, token: str | None = None, hosts: Collection[str] = ()
    ) -> Server:
        """Return the server of this process at an address; start it if there is none.

        Args:
            host: the address to listen on.
            port: a port, 0 for any, None for 8000 or, if it is taken, any.
            token: a secret that permits changing a run; by default a new one.
            hosts: further host names of the pages, such as a proxy's, which then show nothing without the token.

        Raises:
            ConfigurationError: the port is taken, the address is not of this machine, or starlette and uvicorn are missing.
        """
        check_address(host, token)
        with _lock:
            living = {asked: one for asked, one in SERVERS.value.items() if one.lives}
            by_port = {(asked[0], one.port): one for asked, one in living.items()}
            if (running := living.get((host, port)) or by_port.get((host, port or 0))) is not None:
                if token is not None and token != running.token:
                    raise ConfigurationError(
                        f"a dashboard at port {running.port} was started with another token; give both one"
                    )
                if hosts and {*hosts} != running.hosts:
                    raise ConfigurationError(
                        f"a dashboard at port {running.port} was started with hosts={sorted(running.hosts)}; give both the same"
                    )
                return running
            SERVERS.value[host, port] = server = cls(host, port, token, hosts=hosts)
            return server

    def __init__(
        self, host: str, port: int | None, token: str | None, board: Board | None = None, hosts: Collection[str] = ()
    ) -> None:
        uvicorn = _uvicorn()
        from trainbus.observe.dashboard.application import Application
        from trainbus.observe.dashboard.guard import Access

        self.board = board or Board()
        self.token = token or secrets.token_urlsafe(24)
        self.hosts = {*hosts}
        self.is_open = host in LOOPBACK and not hosts
        """True if the pages can be seen without the token: only this machine reaches them."""
        names = {*OWN_NAMES, _in_url(host), *hosts} if hosts or self.is_open else {ANY_NAME}
        access = Access(self.token, hosts=names, to_see=not self.is_open)
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        app = Application(self.board, access, self._cut_off)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE,
        )
        self._server = uvicorn.Server(config)
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
        self.url = f"http://{_in_url(shown)}:{self.port}/#token={self.token}"
        """The address of the pages. The part after ``#`` stays in the browser: it appears in no request and no proxy's log."""
        self._thread = threading.Thread(target=self._serve, name="trainbus dashboard", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def lives(self) -> bool:
        """True until it is closed; False in a forked child."""
        return self._thread.is_alive() and not self.board.closed

    def close(self) -> None:
        """Send the last messages to the pages, and end. Idempotent."""
        atexit.unregister(self.close)
        self.board.closed = True
        self._server.should_exit = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * _GRACE + 1)

    def _serve(self) -> None:
        with self._socket:
            self._server.run(sockets=[self._socket])

    def _cut_off(self, client: Any) -> None:
        """Close the connection of a client that does not read; an orderly close would wait for it."""
        for connection in list(self._server.server_state.connections):
            if connection.client is not None and tuple(connection.client) == tuple(client or ()):
                connection.transport.abort()


def _uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise missing_web(error) from None
    return uvicorn


def missing_web(error: ImportError) -> ConfigurationError:
    """Return the error for a missing library."""
    return cannot_import("the dashboard", "starlette and uvicorn", "web", error, "starlette", "uvicorn")


def _bound(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens at an address."""
    try:
        return _listening(host, DEFAULT_PORT.value if port is None else port)
    except OSError as error:
        if port is None:
            with suppress(OSError):
                return _listening(host, 0)
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigurationError(
            f"the dashboard cannot listen at {host}:{port}: {reason}; give another port, or port=0 for any"
        ) from None


def _listening(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=512)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
