"""A slow disk: a process in which writing below one directory is limited to a rate.

``throttle.c`` is compiled here and loaded before all other libraries (``LD_PRELOAD``), so it replaces functions of the C
library for every caller: Python's files, torch's C++ writer, Rust. A call of write() and its variants returns when its bytes
had their turn on the process's one disk. This needs neither privileges nor a file system. The disk has no cache that takes a
checkpoint at once and loses it in a power cut; with such a cache, a program without syncs would never notice the disk.
:func:`written` returns the number of bytes that had to wait so far. Files with more bytes have bypassed the disk.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("throttle.c")
RATE = 20e6
"""Bytes per second."""


class NoThrottleError(Exception):
    """The C compiler is missing, or it failed."""


def compiled(directory: Path) -> Path:
    """Compile the library into a directory.

    Raises:
        NoThrottleError: the compiler is missing or failed; with the reason.
    """
    library = directory / "throttle.so"
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl", "-lpthread"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    except FileNotFoundError as error:
        raise NoThrottleError(f"throttling needs a C compiler: {error}") from error
    except subprocess.CalledProcessError as error:
        raise NoThrottleError(f"throttle.c does not compile: {error.stderr.strip()}") from error
    return library


@contextmanager
def throttled(module: str, *arguments: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a module in a process for which ``directory`` lies on the slow disk, temporary files included.

    Raises:
        NoThrottleError: the library cannot be compiled.
        RuntimeError: the process failed.
    """
    disk = directory / "disk"
    disk.mkdir()
    environment = {
        **os.environ,
        "LD_PRELOAD": str(compiled(directory)),
        "THROTTLE_DIRECTORY": str(disk.resolve()),
        "THROTTLE_BYTES_PER_SECOND": str(RATE),
        "TMPDIR": str(disk),
    }
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            yield process
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"{module} ended with {process.returncode}")


def written() -> int:
    """Return the bytes that had to wait so far; only in a throttled process."""
    count = ctypes.CDLL(None).throttle_bytes
    count.restype = ctypes.c_uint64
    return count()
