"""``trainbus dashboard``: the live page of runs in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from eventloop.cli.common import say
from eventloop.errors import ConfigurationError
from eventloop.observe import find_runs

Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65535))]


def dashboard(*folders: Path, port: Port | None = None) -> None:
    """Serve a page about runs: their curves over one another, the settings that differ, and a page for each run.

    It reads the files that RunRecordHook and JSONLinesWriter write, so it shows ended runs and follows those that go on, of any
    process. Only this machine can reach it, and it changes nothing. Ctrl-C ends it.

    Args:
        folders: folders of runs, or folders that contain some; by default runs.
        port: port of the page, 0 for any; by default 8000 or, if that is taken, any.
    """
    from eventloop.observe.dashboard import Board, FolderWatcher, Server

    shown = list(dict.fromkeys(folders)) or [Path("runs")]
    for folder in shown:
        if not folder.is_dir():
            raise ConfigurationError(f"{folder}: no such folder; name folders of runs, or one that contains them")
    board = Board(most_ended=None)
    watcher = FolderWatcher(board, shown)
    number = len({run for folder in shown for run in find_runs(folder)})
    server = Server("127.0.0.1", port, None, board)
    try:
        say(f"{number} {'run' if number == 1 else 'runs'} at http://127.0.0.1:{server.port}/ (Ctrl-C ends)")
        watcher.follow()
    except KeyboardInterrupt:
        watcher.end()
    finally:
        server.close()
