"""Where a dashboard is served: the address that it listens at, and the host names that it answers to."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from typing import Final

from trainbus.eventloop.errors import ConfigurationError

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
OWN_NAMES: Final = ("127.0.0.1", "localhost", "[::1]")
"""The host names under which this machine reaches itself."""
ANY_NAME: Final = "*"

_SHORTEST_TOKEN: Final = 16
_NAME: Final = re.compile(r"\*|(\*\.)?[^\s*/:\[\]]+|\[[0-9a-f:.]+\]")


def check_address(host: str, token: str | None) -> None:
    """Raise ConfigurationError for a reachable address without a token, and for a token short enough to guess."""
    if token is None and host not in LOOPBACK:
        raise ConfigurationError(
            f"host={host!r} opens the dashboard to other machines, and visitors can control the run: give token=, such as "
            f"{secrets.token_urlsafe(24)!r}, or leave host= out and use an SSH tunnel"
        )
    if token is not None and not (
        len(token) >= _SHORTEST_TOKEN and token.isascii() and token.isprintable() and " " not in token
    ):
        raise ConfigurationError(
            f"token= has {len(token)} characters: give at least {_SHORTEST_TOKEN} of A-Z, a-z, 0-9, - and _, such as "
            f"{secrets.token_urlsafe(24)!r}"
        )


class HostNames:
    """The host names under which pages are served.

    A site can point a name of its own at this machine (DNS rebinding). Its pages and ours are then one site to a browser, so
    that its scripts see what a visitor sees without the token. Only pages that show nothing without it are served under any
    name.

    Args:
        given: names without a port: ``"train.example.com"``, ``"*.example.com"`` for all below it, ``"*"`` for any.

    Raises:
        ConfigurationError: one is something else, such as an address with ``https://``.
    """

    def __init__(self, given: Collection[str]) -> None:
        names = [str(one).lower() for one in ((given,) if isinstance(given, str) else given)]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"hosts= has {name!r}: give host names without a scheme, port or path, such as 'train.example.com' or "
                    "'*.example.com'"
                )
        self.are_any = ANY_NAME in names
        self._names = frozenset(names)
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))

    def __contains__(self, host: str) -> bool:
        """Return True if pages are served under the name in this Host header."""
        name, colon, port = host.rpartition(":")
        name = (name if colon and port.isdecimal() else host).lower()
        return self.are_any or name in self._names or name.endswith(self._endings)
