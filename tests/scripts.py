"""Runs a script's text in a process of its own, forked from one that has torch imported: in half a second."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
import textwrap
from pathlib import Path
from subprocess import CompletedProcess


def run_script(source: str, folder: Path) -> CompletedProcess[str]:
    """Run it as ``python -c`` does, up to how the interpreter exits.

    Args:
        source: may be indented.
        folder: where what it prints is kept.
    """
    files = [folder / "script.out", folder / "script.err"]
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(textwrap.dedent(source), *map(str, files)))
    process.start()
    process.join(150)
    if process.exitcode is None:
        process.kill()
        process.join()
    return CompletedProcess(source, process.exitcode, *(file.read_text() for file in files))


def _run(source: str, stdout: str, stderr: str) -> None:
    for number, path in enumerate([stdout, stderr], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
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
