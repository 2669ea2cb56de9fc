"""Simulate another operating system for trainbus and its tests: ``TRAINBUS_TESTS_SYSTEM=windows`` (or ``macos``).

Python imports this module when it starts, in worker processes, too, if this folder is on its path. What the system lacks is
hidden from trainbus and its tests alone, because Python and torch were built for Linux.

- Windows: no ``fcntl``, ``resource``, ``/proc``, fork, hard links, symbolic links; of the signals those of C; directories
  cannot be opened; ``os.open`` writes text unless told otherwise; a file in use is neither removed nor renamed nor replaced;
  nothing is renamed over an existing name; names have no ``:``; the clock stands still for 15 ms.
- macOS: ``F_FULLFSYNC``, memory in bytes, no ``/proc``, and less of ``os``; processes are spawned by default.
"""

import builtins
import enum
import errno
import io
import os
import signal
import sys
import time
import types
from pathlib import Path

SYSTEM = os.environ.get("TRAINBUS_TESTS_SYSTEM", "")
TICK = 15_625_000  # nanoseconds between two times that the clock of Windows shows
STDLIB = str(Path(os.__file__).parent) + os.sep
LATER = [f"{STDLIB}site-packages", f"{STDLIB}dist-packages"]
ABSENT = {
    "windows": {
        "os": "fork forkpty register_at_fork O_DIRECTORY O_CLOEXEC O_NOFOLLOW O_NONBLOCK O_SYNC O_DSYNC writev readv pread preadv "
        "pwrite pwritev sysconf uname sched_getaffinity sched_setaffinity fdatasync sync link getpgid getpgrp getsid setsid setpgid "
        "killpg geteuid getuid getegid getgid setuid seteuid chown fchown lchown mkfifo mknod statvfs fstatvfs fchmod fchdir "
        "getpriority setpriority nice getloadavg posix_fadvise posix_fallocate posix_spawn memfd_create eventfd pidfd_open "
        "copy_file_range sendfile wait wait3 wait4 waitid pipe2 mount",
        "signal": "SIGKILL SIGSTOP SIGCONT SIGTSTP SIGHUP SIGUSR1 SIGUSR2 SIGXCPU SIGXFSZ SIGALRM SIGVTALRM SIGPROF SIGCHLD SIGPIPE "
        "SIGQUIT SIGIO SIGURG SIGWINCH SIGSYS SIGTRAP SIGBUS pthread_sigmask pthread_kill siginterrupt setitimer getitimer alarm "
        "pause sigwait sigtimedwait sigpending SIG_BLOCK SIG_SETMASK SIG_UNBLOCK",
        "time": "clock_gettime clock_gettime_ns CLOCK_MONOTONIC CLOCK_REALTIME pthread_getcpuclockid",
    },
    "macos": {
        "os": "sched_getaffinity sched_setaffinity fdatasync posix_fadvise posix_fallocate memfd_create eventfd pidfd_open "
        "copy_file_range O_TMPFILE O_DIRECT preadv2 RWF_NOWAIT",
        "signal": "sigwaitinfo sigtimedwait SIGPOLL SIGPWR SIGSTKFLT SIGRTMIN SIGRTMAX",
    },
}.get(SYSTEM, {})
HIDDEN = {"windows": ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty"), "macos": ()}.get(SYSTEM, ())
LINUX = ("/proc/", "/sys/", "/dev/shm")
BAD_NAME = set('<>:"|?*\\')
OPEN_FILE = io.open


def asker(depth=2):
    """Return the module of trainbus or its tests whose code, maybe through Python's library, has called; else the empty text."""
    frame = sys._getframe(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not (file.startswith((STDLIB, "<frozen")) and not file.startswith(tuple(LATER))):
            name = frame.f_globals.get("__name__", "")
            return name if name.partition(".")[0] in ("trainbus", "tests") else ""
        frame = frame.f_back
    return ""


class Shown(types.ModuleType):
    """A module as the system has it."""

    def __init__(self, real, absent, instead):
        super().__init__(real.__name__)
        names = {"_real": real, "_absent": frozenset(absent.split()), "_instead": instead}
        self.__dict__.update(names, _before={name: getattr(real, name, None) for name in instead})

    def __getattr__(self, name):
        if name in self._absent:
            raise AttributeError(f"module {self._real.__name__!r} has no attribute {name!r}", name=name, obj=self)
        found = self._instead.get(name) if name in self._instead else getattr(self._real, name)
        if name in self._instead and getattr(self._real, name, None) is not self._before[name]:
            return getattr(self._real, name)  # a test has replaced it
        return found

    def __setattr__(self, name, value):
        own = name in self._instead and value is self._instead[name]
        setattr(self._real, name, self._before[name] if own else value)

    def __delattr__(self, name):
        delattr(self._real, name)

    def __dir__(self):
        return [name for name in dir(self._real) if name not in self._absent]


def users(path):
    """Return True if this process has a file, or one below a directory, open or mapped."""
    real = os.path.realpath(os.fspath(path) if not isinstance(path, bytes) else os.fsdecode(path))
    if os.path.islink(path):
        return False
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target == real or target.startswith(real + "/"):
            return True
    with OPEN_FILE("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any(f" {real}\n" in line or f" {real}/" in line for line in maps)


def at(path, dir_fd):
    if isinstance(path, int):
        return None
    text = os.fsdecode(os.fspath(path))
    return text if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)


def refuse_in_use(path):
    if path is not None and os.path.lexists(path) and users(path):
        raise PermissionError(errno.EACCES, "the file is in use", path)


def windows():
    rename, replace, unlink, rmdir, mkdir, real_open = os.rename, os.replace, os.unlink, os.rmdir, os.mkdir, io.open

    def sim_rename(source, target, *, src_dir_fd=None, dst_dir_fd=None, over=False):
        if asker():
            old, new = at(source, src_dir_fd), at(target, dst_dir_fd)
            refuse_in_use(old)
            check_name(new)
            if os.path.lexists(new) and not (os.path.exists(old) and os.path.exists(new) and os.path.samefile(old, new)):
                if not over:
                    raise FileExistsError(errno.EEXIST, "the name exists", new)
                refuse_in_use(new)
                if os.path.isdir(new):
                    raise PermissionError(errno.EACCES, "a directory cannot be replaced", new)
        (replace if over else rename)(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def sim_replace(source, target, *, src_dir_fd=None, dst_dir_fd=None):
        sim_rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, over=True)

    def sim_unlink(path, *, dir_fd=None):
        if asker():
            refuse_in_use(at(path, dir_fd))
        unlink(path, dir_fd=dir_fd)

    def sim_rmdir(path, *, dir_fd=None):
        if asker():
            refuse_in_use(at(path, dir_fd))
        rmdir(path, dir_fd=dir_fd)

    def sim_mkdir(path, mode=0o777, *, dir_fd=None):
        if asker():
            check_name(at(path, dir_fd))
        mkdir(path, mode, dir_fd=dir_fd)

    def opened(file, *args, **options):
        if not isinstance(file, int) and asker():
            text = os.fsdecode(os.fspath(file))
            if text.startswith(LINUX):
                raise FileNotFoundError(errno.ENOENT, "no such file on Windows", text)
            check_name(text)
        return real_open(file, *args, **options)

    def check_name(path):
        if path is not None and not os.path.lexists(path):
            base = os.path.basename(path)
            if BAD_NAME & set(base) or (base != base.rstrip(". ") and base not in (".", "..")):
                raise OSError(errno.EINVAL, "there are no such names", path)

    binary = 1 << 28

    def sim_os_open(path, flags, mode=0o777, *, dir_fd=None):
        name = sys._getframe(1).f_globals.get("__name__", "")
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Windows opens no directories", path)
        if name.startswith("trainbus") and not flags & binary:
            raise AssertionError(f"{path} is opened as text: os.write changes its line ends on Windows")
        check_name(at(path, dir_fd))
        return real_os_open(path, flags & ~binary, mode, dir_fd=dir_fd)

    def no_symlink(existing, new, *args, **options):
        raise OSError(errno.EPERM, "a privilege is missing", new)

    def kill(pid, number):
        if not number:
            raise AssertionError("this would end the process")
        real_kill(pid, number)

    real_os_open, real_kill = os.open, os.kill
    handlers = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
    set_handler = signal.signal

    def sim_signal(number, handler):
        if signal.Signals(number).name not in handlers:
            raise ValueError("invalid signal value")
        return set_handler(number, handler)

    everywhere = {"rename": sim_rename, "replace": sim_replace, "unlink": sim_unlink, "remove": sim_unlink}
    for name, function in (everywhere | {"rmdir": sim_rmdir, "mkdir": sim_mkdir}).items():
        function.__module__, function.__qualname__ = "os", name  # as a pickle names it
        setattr(os, name, function)
    io.open = builtins.open = opened

    def locking(descriptor, mode, size):
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "locked") from None

    locks = types.ModuleType("msvcrt")  # not in sys.modules: by this module Python's library knows Windows
    locks.LK_NBLCK, locks.locking = 2, locking
    import multiprocessing.context

    contexts = multiprocessing.context.DefaultContext.get_context

    def get_context(self, method=None):
        name = asker()
        if method in ("fork", "forkserver") and name != "tests.scripts":  # which starts programs faster by it
            raise ValueError(f"cannot find context for {method!r}")
        return contexts(self, method)

    multiprocessing.context.DefaultContext.get_context = get_context
    multiprocessing.get_all_start_methods = lambda: ["spawn"]
    multiprocessing.get_context = multiprocessing.context._default_context.get_context
    return {
        "os": (os, {"name": "nt", "O_BINARY": binary, "open": sim_os_open, "symlink": no_symlink, "kill": kill}),
        "signal": (
            signal,
            {"signal": sim_signal, "Signals": enum.IntEnum("Signals", {one: getattr(signal, one) for one in handlers})},
        ),
        "time": (
            time,
            {
                "time_ns": lambda real=time.time_ns: real() // TICK * TICK,
                "time": lambda real=time.time_ns: real() // TICK * TICK / 1e9,
            },
        ),
        "sys": (sys, {"platform": "win32"}),
        "msvcrt": (locks, {}),
    }


def macos():
    import fcntl
    import resource

    real_open, control, usage = io.open, fcntl.fcntl, resource.getrusage

    def opened(file, *args, **options):
        if not isinstance(file, int) and os.fsdecode(os.fspath(file)).startswith(LINUX) and asker():
            raise FileNotFoundError(errno.ENOENT, "no such file on macOS", file)
        return real_open(file, *args, **options)

    def full_sync(descriptor, command, *args):
        return os.fsync(descriptor) if command == 51 else control(descriptor, command, *args)

    def in_bytes(who):
        found = usage(who)
        return types.SimpleNamespace(
            **{n: getattr(found, n) * (1024 if n == "ru_maxrss" else 1) for n in dir(found) if n[:3] == "ru_"}
        )

    io.open = builtins.open = opened
    return {
        "os": (os, {}),
        "signal": (signal, {}),
        "sys": (sys, {"platform": "darwin"}),
        "fcntl": (fcntl, {"F_FULLFSYNC": 51, "fcntl": full_sync}),
        "resource": (resource, {"getrusage": in_bytes}),
    }


def install():
    import multiprocessing

    shown = {
        name: Shown(real, ABSENT.get(name, ""), instead)
        for name, (real, instead) in {"windows": windows, "macos": macos}[SYSTEM]().items()
    }
    multiprocessing.set_start_method("spawn")
    real_import = builtins.__import__

    def sim_import(name, globals=None, locals=None, fromlist=(), level=0):
        own = "" if level or globals is None else globals.get("__name__", "").partition(".")[0]
        if own in ("trainbus", "tests"):
            if name in HIDDEN:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in shown:
                return shown[name]
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = sim_import


if SYSTEM:
    install()
