"""``Guard``: refuse requests without the token, and requests that another site's page sends through the visitor's browser."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainbus.observe.dashboard.addresses import OWN_NAMES, HostNames

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Access:
    """Decide which requests may change a run, and which may see it.

    Args:
        token: permits changing a run, in the header ``Authorization: Bearer TOKEN``.
        may_change: the application's own decision, instead of a token.
        hosts: host names of the pages; see :class:`HostNames`. Requests for other names are refused.
        to_see: require the token to see anything, as under any name.
    """

    def __init__(
        self,
        token: str | None = None,
        may_change: Callable[[Request], bool] | None = None,
        hosts: Collection[str] = OWN_NAMES,
        *,
        to_see: bool = False,
    ) -> None:
        self._token = token
        self._may_change = may_change
        self.hosts = HostNames(hosts)
        self.to_see = to_see or self.hosts.are_any

    @property
    def mode(self) -> str:
        """How a request may change a run: by "token", by "application" (``may_change``), or not at all: "nobody"."""
        return "token" if self._token is not None else "application" if self._may_change is not None else "nobody"

    def allows(self, request: Request) -> bool:
        """Return True if a request may change a run."""
        if self._may_change is not None:
            return self._may_change(request)
        if self._token is None:
            return False
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode())


class Guard:
    """ASGI middleware in front of all pages of the dashboard."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward or refuse a request; add the headers that keep other sites out to either response."""

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        await (self.app if refusal is None else refusal)(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host not in self.access.hosts:
            return refused(400, f"the dashboard is not served under the name {host[:100]!r}; list it in hosts=")
        reads = scope["method"] in ("GET", "HEAD")
        if _of_another_site(headers, host, reads=reads):
            return refused(
                403, "this request was sent by a page of another site, or through a proxy that does not pass the Host header on"
            )
        is_page = reads and _is_static(scope)
        if self.access.to_see and not is_page and not self.access.allows(Request(scope)):
            return refused(401, "the token is missing: open the address that the dashboard logged at its start")
        return None


def refused(status: int, message: str) -> JSONResponse:
    """Return the response to a refused request."""
    return JSONResponse({"error": message}, status_code=status)


def _of_another_site(headers: Headers, host: str, *, reads: bool) -> bool:
    # Browsers send this one over HTTPS and to localhost. No page can set it, and it holds where a proxy gives another Host.
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in ("none", "same-origin") and not (reads and headers.get("sec-fetch-mode") == "navigate")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != host


def _is_static(scope: Scope) -> bool:
    """Return True for the pages' own files. They contain no data of a run: their scripts fetch it with the token."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    first, _, rest = path.lstrip("/").partition("/")
    return first in ("", "static") or (first == "runs" and rest.rstrip("/").isdecimal())
