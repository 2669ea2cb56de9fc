"""Speak to the operating system where systems differ. No other module does.

Linux is what trainbus runs on every day. What macOS and Windows lack is simulated in the tests (``python -m tests.systems``).
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from trainbus.eventloop.seams import Seam

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from subprocess import Popen

try:
    import fcntl
    import resource
except ImportError:
    _unix = False
else:
    _unix = True

P = ParamSpec("P")
R = TypeVar("R")

_WINDOWS: Final = os.name == "nt"
_SYSTEM: Final[str] = sys.platform
IN_USE_STAYS: Final = _WINDOWS
"""Whether a file that is open can be neither removed nor renamed nor replaced, and a name that exists is not renamed over."""
PATIENCE: Final = Seam(5.0)
"""Seconds to wait for other programs that have a file open, such as a scanner for viruses, where files in use stay."""
_NOT_EVERYWHERE: Final = '<>:"/\\|?*'
NOT_IN_NAMES: Final = _NOT_EVERYWHERE if _WINDOWS else "/"
"""Characters that no file's name has."""

# ---------------------------------------------------------------------------------------------------------------- files

_BINARY = getattr(os, "O_BINARY", 0)  # else Windows writes b"\r\n" for b"\n"
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # not through a link; opening a FIFO does not wait
_LOCKED: Final = 1 << 30
_serial = itertools.count()


def open_file(path: str | os.PathLike[str], flags: int, *, follow: bool = False) -> int:
    """Open a file by the system's flags and return its descriptor. A link is not followed, unless ``follow`` says so."""
    if not (follow or hasattr(os, "O_NOFOLLOW")) and Path(path).is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags | _BINARY | (0 if follow else _PLAIN), 0o666)  # the umask decides, as with open()


def portable_name(text: str) -> str:
    """Return ``text`` as a part of a file name on every system: ``_`` stands for characters that one of them refuses."""
    return "".join("_" if one in _NOT_EVERYWHERE or one < " " else one for one in text)


def refused_name(path: Path) -> str:
    """Return the first name in a path that no file can have here; "" if there is none."""
    names = path.parts[len(path.anchor) > 0 :] if _WINDOWS else ()
    return next((one for one in names if {*one} & {*NOT_IN_NAMES} or (one[-1] in ". " and one.strip("."))), "")


def unique_name() -> str:
    """Return text that no other process or thread on this machine makes."""
    # Unlike random bytes, this takes no system call. The clock of Windows stands still for 15 ms.
    return f"{os.getpid():x}-{time.time_ns():x}-{next(_serial):x}"


def patiently(change: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Call a function that renames or removes files.

    Some systems refuse this while a file is open elsewhere. There, try again for at most ``PATIENCE`` seconds.

    Raises:
        PermissionError: the file is still open then.
    """
    if not IN_USE_STAYS:
        return change(*args, **options)
    deadline, pause = time.monotonic() + PATIENCE.value, 0.001
    while True:
        try:
            return change(*args, **options)
        except PermissionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def sync(descriptor: int) -> None:
    """Wait until what was written to a file is on the disk. macOS' ``fsync`` leaves it in the cache of the disk."""
    if not _sync_fully(descriptor):
        os.fsync(descriptor)


def sync_data(descriptor: int) -> None:
    """Do as :func:`sync`, but leave out what only tells when the file was changed."""
    if not _sync_fully(descriptor):
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(descriptor)


def _sync_fully(descriptor: int) -> bool:
    if not (_unix and hasattr(fcntl, "F_FULLFSYNC")):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):  # some network file systems have only fsync
            raise
        return False
    return True


def sync_path(path: str | os.PathLike[str]) -> None:
    """Make a file, or the names in a directory, durable."""
    if Path(path).is_dir():
        sync_directory(path)
        return
    descriptor = open_file(path, os.O_RDWR if _WINDOWS else os.O_RDONLY, follow=True)  # Windows syncs only what it may write
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable, where the system and the file system can."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no directory, and writes its changes to a journal
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def write_together(descriptor: int, parts: Sequence[memoryview | bytes]) -> int:
    """Write several parts by one system call; return the number of bytes written, 0 on systems without such a call."""
    return os.writev(descriptor, parts) if hasattr(os, "writev") else 0


def read_at(descriptor: int, size: int, place: int) -> bytes:
    """Read at most ``size`` bytes at a place of a file. A file that is open to append goes on at its end."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, place)
    os.lseek(descriptor, place, os.SEEK_SET)
    return os.read(descriptor, size)


def link_file(existing: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    """Give a file a second name.

    Raises:
        OSError: the system or the file system has no hard links.
    """
    if not hasattr(os, "link"):
        raise OSError(errno.ENOTSUP, "this system has no hard links", str(new))
    os.link(existing, new)


def path_of_url(path: str) -> str:
    """Return the path on this system that a ``file:`` URL has, ``C:/run`` for ``/C:/run``."""
    return path[1:] if _WINDOWS and path[2:3] == ":" else path


def lock(descriptor: int) -> None:
    """Lock a file until it is closed, or its process ends.

    Raises:
        BlockingIOError: another process, or another descriptor of this one, has locked it.
        OSError: the file system has no locks.
    """
    if _unix:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    try:
        # A byte far behind the content, because no other process can read what is locked.
        os.lseek(descriptor, _LOCKED, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # of Windows
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EDEADLK):
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it") from None
        raise
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


# --------------------------------------------------------------------------------------------------- processes, signals

KILLED: Final = -getattr(signal, "SIGKILL", signal.SIGTERM)
"""The exit code of a process that ``kill()`` has ended."""


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of the named signals that the system has."""
    return tuple(one for name in names if (one := getattr(signal, name, None)) is not None)


def block_signals(numbers: Collection[signal.Signals]) -> set[signal.Signals]:
    """Have signals wait, in this thread and in processes that it starts; return those that did not wait already."""
    if not hasattr(signal, "pthread_sigmask"):
        return set()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    return {number for number in numbers if number not in before}


def unblock_signals(numbers: Collection[signal.Signals]) -> None:
    """Let signals come again."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def handle_signal(number: signal.Signals, handler: Callable[[int, Any], object]) -> None:
    """Have a handler called for a signal, which interrupts no read in C code."""
    signal.signal(number, handler)
    if hasattr(signal, "siginterrupt"):
        signal.siginterrupt(number, False)


def pass_signal(process: Popen[Any], number: int) -> None:
    """Send a signal to a process that was started with ``start_new_session=True``."""
    # There are no sessions on Windows: the console has told the process of Ctrl-C already.
    if not (_WINDOWS and number == signal.SIGINT):
        process.send_signal(number)


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    in_parent: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Have functions called before and after each fork, where processes fork."""
    if hasattr(os, "register_at_fork"):
        hooks = {"before": before, "after_in_parent": in_parent, "after_in_child": in_child}
        os.register_at_fork(**{name: hook for name, hook in hooks.items() if hook is not None})


def inheritable(descriptor: int) -> Connection | None:
    """Return what gives a spawned process a copy of a descriptor; None where only sockets and pipes are passed on."""
    from multiprocessing.connection import Connection

    return None if _WINDOWS else Connection(os.dup(descriptor))


def is_running(pid: int) -> bool | None:
    """Return whether a process of this machine runs; None where that cannot be asked (Windows' ``os.kill`` ends it)."""
    if _WINDOWS:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def began(pid: int) -> tuple[str, str]:
    """Return text for the boot of this machine, and for the moment since it when a process began; empty where unknown."""
    # The name of the command, in parentheses, may hold spaces. The 20th field behind it is the start time.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return _read("/proc/sys/kernel/random/boot_id").strip(), fields[19] if len(fields) > 19 else ""


def command_of_parent() -> str:
    """Return the command of the process that has started this one; empty where unknown."""
    return _read(f"/proc/{os.getppid()}/cmdline").replace("\0", " ")


# ------------------------------------------------------------------------------------------------- memory, the machine


def memory_in_use() -> int:
    """Return the resident bytes of this process; where that is not told, the most so far, or 0."""
    with suppress(IndexError, ValueError):
        return int(_read("/proc/self/statm").split()[1]) * mmap.PAGESIZE
    return most_memory() or 0


def most_memory() -> int | None:
    """Return the most resident bytes that this process has had; None where unknown."""
    if not _unix:
        return None
    most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if _SYSTEM == "darwin" else 1024 * most


def memory_of_machine(*, container: bool = True) -> int | None:
    """Return the bytes of memory, used or not, of this machine, or of this ``container``; None where unknown."""
    limits = []
    with suppress(AttributeError, OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes") if container else ():
        with suppress(ValueError):  # the file is missing, or says "max"
            limits.append(int(_read(file)))
    return min(limits, default=None)


def map_pages(begin: int, length: int) -> bool:
    """Map memory that is to be written, from an address at a page's begin; return False where the system cannot."""
    if _SYSTEM != "linux":
        return False
    # ``MADV_POPULATE_WRITE`` of Linux 5.14. Python's own ``madvise`` holds the GIL meanwhile.
    advise: Any = ctypes.CDLL(None).madvise
    return not advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), 23)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_container() -> float | None:
    """Return how many cores' time this container gets; None without a limit."""
    with suppress(ValueError):
        quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
        return float(quota) / float(period)
    return None


def shared_memory() -> Path | None:
    """Return the directory of shared memory, where there is one."""
    found = Path("/dev/shm")  # noqa: S108 - to look at, not to write to
    return found if found.is_dir() else None


def processor() -> str:
    """Return the name of the processor."""
    lines = (line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name"))
    return next((line.partition(":")[2].strip() for line in lines), platform.machine())


def system() -> str:
    """Return the names of the system, its release and the machine, such as ``Linux-6.8.0-x86_64-with-glibc2.36``.

    ``platform.platform()`` and ``platform.processor()`` run a program, ``uname -p``, with a pipe, which a DataLoader's worker
    that is forked meanwhile would hold open.
    """
    if not hasattr(os, "uname"):
        return platform.platform()  # no workers are forked there
    name = os.uname()
    library = "".join(platform.libc_ver())
    return "-".join([name.sysname, name.release, name.machine, *(["with", library] if library else [])])


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
