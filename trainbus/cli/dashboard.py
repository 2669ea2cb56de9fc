"""``trainbus dashboard``: the live page of runs in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from trainbus.cli.common import say
from trainbus.eventloop.errors import ConfigurationError
from trainbus.observe import find_runs

Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65535))]


def dashboard(
    *folders: Path, port: Port | None = None, host: str = "127.0.0.1", token: str | None = None, hosts: tuple[str, ...] = ()
) -> None:
    """Serve a page about runs: their curves over one another, the settings that differ, and a page for each run.

    It reads the files that RunRecordHook and JSONLinesWriter write, so it shows ended runs and follows those that go on, of any
    process. It changes nothing. Ctrl-C ends it.

    Args:
        folders: folders of runs, or folders that contain some; by default runs.
        port: port of the page, 0 for any; by default 8000 or, if that is taken, any.
        host: address to listen on; by default only this machine can reach it.
        token: at least 16 characters; needed for any other host, where the page cannot be seen without it.
        hosts: a host name under which a proxy serves the page, or * for any; may be repeated. Then, too, the page cannot be
            seen without the token, which is part of the address that is printed.
    """
    from trainbus.observe.dashboard import Board, FolderWatcher, Server, check_address

    check_address(host, token)
    shown = list(dict.fromkeys(folders)) or [Path("runs")]
    for folder in shown:
        if not folder.is_dir():
            raise ConfigurationError(f"{folder}: no such folder; name folders of runs, or one that contains them")
    board = Board(most_ended=None)
    watcher = FolderWatcher(board, shown)
    number = len({run for folder in shown for run in find_runs(folder)})
    server = Server(host, port, token, board, hosts)
    address = server.url.partition("#")[0] if server.is_open else server.url
    try:
        say(f"{number} {'run' if number == 1 else 'runs'} at {address} (Ctrl-C ends)")
        watcher.follow()
    except KeyboardInterrupt:
        watcher.end()
    finally:
        server.close()
