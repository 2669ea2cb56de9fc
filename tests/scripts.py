"""Runs scripts in processes of their own, forked from one that has torch imported: one starts in a tenth of a second."""

import atexit
import ctypes
import gc
import multiprocessing
import os
import sys
import textwrap
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Self

from torch.distributed import TCPStore

from trainbus.eventloop.bus import lifecycle

TRAINBUS = "import sys; from trainbus import main; sys.exit(main())"
"""The command, as the source of a script."""


class Script:
    """A script's text that runs as ``python -c`` does, up to how the interpreter exits.

    Args:
        source: may be indented.
        folder: where what it prints is kept.
        name: of the files for that.
        arguments: its ``sys.argv``, from the second on.
        environment: variables beside this process's own.
        cwd: the folder that it runs in and imports from; None: that of this process.
        stdin: the path of a file that it reads.
    """

    def __init__(
        self,
        source: str,
        folder: Path,
        *,
        name: str = "script",
        arguments: Sequence[object] = (),
        environment: Mapping[str, object] | None = None,
        cwd: Path | None = None,
        stdin: Path | None = None,
    ) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        for file in (self.out, self.err):
            if not file.exists():  # it may be a pipe
                file.touch()
        variables = {key: str(value) for key, value in (environment or {}).items()}
        self.process = multiprocessing.get_context("forkserver").Process(
            target=_run,
            args=(textwrap.dedent(source), [*map(str, arguments)], variables, *map(_text, (cwd, stdin, self.out, self.err))),
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, seconds: float = 150) -> CompletedProcess[str]:
        """Wait for its end; one that takes longer is killed."""
        self.process.join(seconds)
        self.kill()
        return CompletedProcess(self.process.name, self.process.exitcode or 0, self.out.read_text(), self.err.read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def run_script(source: str, folder: Path, **options: Any) -> CompletedProcess[str]:
    """Run it to its end."""
    return Script(source, folder, **options).wait()


def run_on_ranks(
    source: str, folder: Path, *, size: int = 2, environment: Mapping[str, object] | None = None, **options: Any
) -> list[CompletedProcess[str]]:
    """Run it in ``size`` processes with the environment and the store that ``torchrun`` gives."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    job |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": True, **(environment or {})}
    started = [
        Script(source, folder, name=f"rank{rank}", environment=job | {"RANK": rank, "LOCAL_RANK": rank}, **options)
        for rank in range(size)
    ]
    return [one.wait() for one in started]


def start_processes_by_default() -> None:
    """In a process of a fork server: let loaders start their workers as they do in a program, not from a server again."""
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _run(
    source: str,
    arguments: list[str],
    environment: dict[str, str],
    cwd: str | None,
    stdin: str | None,
    stdout: str,
    stderr: str,
) -> None:
    files = [(stdin or os.devnull, os.O_RDONLY), *((path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in (stdout, stderr))]
    for number, (path, flags) in enumerate(files):
        os.dup2(os.open(path, flags), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed the one that was
    start_processes_by_default()
    sys.argv = ["-c", *arguments]
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
        sys.path.insert(0, "")
    if sys.version_info >= (3, 13):  # there a forked process has forgotten what the server's modules told atexit
        atexit.register(weakref.finalize._exitfunc)  # torch's
        atexit.register(lifecycle._close_at_exit)
    gc.freeze()  # what the server has imported is no garbage of the script: its exit takes a third of the time
    status = 0
    try:
        exec(compile(source, "<script>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the text of a test
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
        status = 1
    ctypes.pythonapi.Py_Exit(status)  # joins threads, calls what atexit knows: a process of multiprocessing leaves that out
