"""An S3 server in this process, with the faults of a network and of a busy store in front of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET: Final = "bucket"
Fault = Callable[[str, str], str | None]
"""Given the method (``COPY`` for a copy) and the path with its query, returns the status to answer with, or None for no fault.

``"reset"`` breaks the connection, and ``"lost"`` does so after the server has done what was asked.
"""


class _Silent(WSGIRequestHandler):
    def log(self, *args: Any) -> None:
        pass


class S3Server:
    """A server of ``moto`` on a free port of this machine. It has no bucket."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        """Method and path of each request that it got, such as ``"PUT /bucket/a"``, since the list was cleared."""
        self.fault: Fault = lambda method, path: None
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Silent)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Stop the server; its buckets are gone."""
        self.fault = lambda method, path: None
        get_backend("s3").reset()  # moto keeps them for the process
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"] + (f"?{query}" if (query := environ["QUERY_STRING"]) else "")
        self.requests.append(f"{environ['REQUEST_METHOD']} {path}")
        copies = "HTTP_X_AMZ_COPY_SOURCE" in environ
        fault = self.fault("COPY" if copies else environ["REQUEST_METHOD"], path)
        if fault is None:
            return self._app(environ, start_response)
        if fault == "lost":
            list(self._app(environ, lambda *_: None))
        if fault in ("reset", "lost"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)  # a close would leave it to werkzeug, which reads on
            raise ConnectionResetError
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(fault, [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>"]
