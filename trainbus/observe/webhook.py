"""``Webhook``: post JSON to an address from a thread of its own, with retries; nothing here raises or holds up a caller."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections import deque
from http.client import HTTPException
from time import monotonic
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from trainbus.eventloop import ConfigurationError, get_logger
from trainbus.eventloop.seams import Seam

log = get_logger()

_MOST: Final = 100  # messages that wait; beyond it the oldest are dropped
_TIMEOUT: Final = 10.0  # seconds that an answer may take
FIRST_PAUSE: Final = Seam(1.0)  # seconds between tries, at the beginning
_LONGEST_PAUSE = 60.0
_LONGEST: Final = 3600.0  # seconds for which a message is tried
_GRACE: Final = 0.5  # seconds for the thread to end
_AGAIN: Final = (408, 425, 429)  # statuses below 500 after which another try may succeed

_VARIABLE: Final = re.compile(r"\$(\w+)|\$\{(\w+)\}")


def address(option: str, given: str) -> str:
    """Return the URL that an option gives, or names as an environment variable: ``"$SLACK_WEBHOOK"``.

    Raises:
        ConfigurationError: it is no URL of http or https, or the variable is not set. The message shows the host at most.
    """
    url = given
    if variable := _VARIABLE.fullmatch(given):
        name = variable[1] or variable[2]
        if not (url := os.environ.get(name, "").strip()):
            raise ConfigurationError(f"{option}={given!r}: the environment variable {name} is not set")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ConfigurationError(f"{option}: the host or the port of the URL is not valid") from None
    shown = f"{option}: {parts.scheme or 'no scheme'}://{host or '(no host)'}"
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ConfigurationError(f'{shown} is not the URL of a webhook; give one such as "https://example.org/hook"')
    if "@" in parts.netloc:
        raise ConfigurationError(f"{shown} has a user or a password, which webhooks do not take; give the URL without them")
    if not re.fullmatch(r"[!-~]+", url):
        raise ConfigurationError(f"{shown}: the URL has blanks or characters that are not ASCII; encode them, such as %20")
    return url


class _NotRedirected(HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        """Refuse: urllib would turn the POST into a GET."""


class _Message(NamedTuple):
    body: bytes
    since: float


class Webhook:
    """Post messages to a URL, one after the other, by a daemon thread that begins with the first one.

    A message that fails is tried again for an hour, after pauses from 1 s to 60 s; then it is dropped. It is dropped at once
    if the server refuses it (a redirect, or a status of 400 to 499 other than 408, 425 and 429). The first failure is logged,
    with the host only; further ones are not, until a message succeeds. Proxies are those of ``urllib`` (``https_proxy``).
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._host = urlsplit(url).hostname or ""
        self._opener = build_opener(_NotRedirected)
        self._waiting: deque[_Message] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._until: float | None = None  # when closing: how long to go on
        self._failing = False
        self._lost = 0

    def post(self, body: bytes) -> None:
        """Have a JSON object posted soon. Safe from any thread; never waits for the network."""
        with self._changed:
            if len(self._waiting) == _MOST:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(_Message(body, monotonic()))
            self._until = None  # another run
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trainbus-webhook", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def post_rest(self, timeout: float, wait: float) -> None:
        """Post what waits, the newest first, for at most ``timeout`` seconds; then log how many messages were lost.

        Returns after ``wait`` seconds at most. For the rest of the time, the interpreter's exit waits.
        """
        with self._changed:
            self._until = monotonic() + timeout
            self._changed.notify_all()
        if (thread := self._thread) is not None:
            atexit.register(self._join)
            thread.join(min(wait, timeout))

    def _join(self) -> None:
        if (thread := self._thread) is not None and self._until is not None:
            thread.join(max(0.0, self._until - monotonic()) + _GRACE)

    def _run(self) -> None:
        self._post_all()
        atexit.unregister(self._join)
        if self._lost:
            log.warning("alerts were not delivered", id="alerts-not-delivered", host=self._host, alerts=self._lost)
            self._lost = 0

    def _post_all(self) -> None:
        failures = 0
        while (message := self._next(failures)) is not None:
            error = self._post(message.body)
            final = error is None or _is_final(error) or monotonic() - message.since > _LONGEST
            failures = 0 if final else failures + 1
            if error is not None and not self._failing:
                what = "is not delivered" if final else "will be tried again"
                log.warning(
                    f"the webhook fails; an alert {what}, and training goes on",
                    id="webhook-failed",
                    host=self._host,
                    error=_words(error),
                )
            self._failing = error is not None
            with self._changed:
                if final and message in self._waiting:
                    self._waiting.remove(message)
                    self._lost += error is not None

    def _next(self, failures: int) -> _Message | None:
        """Wait for the next message, or for the pause after a failure; return None at the end."""
        with self._changed:
            due = monotonic() + (min(FIRST_PAUSE.value * 2 ** min(failures - 1, 10), _LONGEST_PAUSE) if failures else 0.0)
            while True:
                now = monotonic()
                if self._until is not None:
                    if not self._waiting or now >= self._until:
                        self._lost += len(self._waiting)
                        self._waiting.clear()
                        self._thread = None  # the next message begins another one
                        return None
                    due = min(due, now + FIRST_PAUSE.value)
                if self._waiting and now >= due:
                    return self._waiting[-1 if self._until is not None else 0]
                wakes = [due] if self._waiting else []
                wakes += [] if self._until is None else [self._until]
                self._changed.wait(max(0.0, min(wakes) - now) if wakes else None)

    def _post(self, body: bytes) -> Exception | None:
        """Post once; return the error, if there is one."""
        headers = {"Content-Type": "application/json", "User-Agent": "trainbus"}
        left = _TIMEOUT if self._until is None else min(_TIMEOUT, max(0.1, self._until - monotonic()))
        try:
            with self._opener.open(Request(self._url, body, headers), timeout=left):  # noqa: S310 - http or https: see address()
                return None
        except HTTPError as error:
            error.close()
            return error
        except (OSError, HTTPException, ValueError) as error:
            return error


def _is_final(error: Exception) -> bool:
    return isinstance(error, HTTPError) and error.code < 500 and error.code not in _AGAIN


def _words(error: Exception) -> str:
    """Describe an error without the URL, which may be a secret."""
    if isinstance(error, HTTPError):
        return f"status {error.code}"
    reason = error.reason if isinstance(error, URLError) else error
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else ""
    return f"{type(reason).__name__}: {text}" if text else type(reason).__name__
