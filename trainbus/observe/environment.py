"""Describe the machine, the process and the code of a run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Final

import msgspec

from trainbus.eventloop import platform
from trainbus.eventloop.bounds import Count
from trainbus.eventloop.plain import command_without_secrets

_LIBRARIES: Final = {
    **{name: name for name in ("numpy", "torchvision", "lightning", "transformers", "trl", "accelerate", "deepspeed", "ray")},
    "pytorch_lightning": "pytorch-lightning",
    "ignite": "pytorch-ignite",
    "torchft": "torchft-nightly",
}
"""Distributions whose versions are recorded if they are imported, by the name of the module."""


class Computer(msgspec.Struct, frozen=True):
    """The computer: its name, processor, number of usable cores, memory in bytes, and GPUs."""

    host: str
    system: str
    processor: str
    cores: Count
    memory: Count
    gpus: list[str]


class Git(msgspec.Struct, frozen=True):
    """The commit of the working folder, and whether tracked files were changed."""

    commit: str
    branch: str
    clean: bool


class Process(msgspec.Struct, frozen=True):
    """The identity of a process, to find out later whether it still runs. ``began`` and ``boot`` are empty where unknown."""

    pid: Count
    host: str
    boot: str
    began: str

    def lives(self) -> bool | None:
        """Return whether the process is running; None if it is on another machine, or cannot be asked."""
        if self.host != socket.gethostname():
            return None
        return platform.is_running(self.pid) if self == this_process(self.pid) else False


class Environment(msgspec.Struct, frozen=True):
    """The machine, process and software of a run. ``command`` has one string per argument, without secrets."""

    command: list[str]
    folder: str
    process: Process
    machine: Computer
    versions: dict[str, str]
    git: Git | None


def environment() -> Environment:
    """Describe this process. Takes about 20 ms, because it runs git and reads files."""
    folder = Path.cwd()
    command = command_without_secrets(sys.orig_argv)
    return Environment(command, str(folder), this_process(), _machine(), versions() | _libraries(), _git(folder))


def this_process(pid: int | None = None) -> Process:
    """Return the identity of this process, or of another one on this machine."""
    pid = os.getpid() if pid is None else pid
    return Process(pid, socket.gethostname(), *platform.began(pid))


def _machine() -> Computer:
    from trainbus.eventloop.device import device_names

    memory = platform.memory_of_machine(container=False) or 0
    host, cores = socket.gethostname(), platform.cores()
    return Computer(host, platform.system(), platform.processor(), cores, memory, device_names())


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and trainbus; without the latter in a checkout that is not installed."""
    from importlib import metadata

    import torch

    found = {"python": sys.version.partition(" ")[0], "torch": str(torch.__version__)}
    with suppress(metadata.PackageNotFoundError):
        found["trainbus"] = metadata.version("trainbus")
    return found


def _libraries() -> dict[str, str]:
    """Return the versions of the imported libraries on which results may depend."""
    from importlib import metadata

    found = {}
    for module, distribution in _LIBRARIES.items():
        if module in sys.modules:
            with suppress(metadata.PackageNotFoundError):
                found[distribution] = metadata.version(distribution)
    return found


def _git(folder: Path) -> Git | None:
    program = shutil.which("git")
    if program is None:
        return None

    def ask(*words: str) -> str:
        # No pipe: a DataLoader's worker that is forked meanwhile would hold it open, and reading would wait for that worker.
        # Popen makes one of its own, too, unless it can use posix_spawn: hence the full path and close_fds=False.
        with tempfile.TemporaryFile() as answer:
            command = [program, "-C", str(folder), *words]
            subprocess.run(  # noqa: S603
                command, stdin=DEVNULL, stdout=answer, stderr=DEVNULL, timeout=5, check=True, close_fds=False
            )
            answer.seek(0)
            return answer.read().decode(errors="replace").strip()

    try:
        changed = ask("status", "--porcelain", "--untracked-files=no")
        return Git(ask("rev-parse", "HEAD"), ask("rev-parse", "--abbrev-ref", "HEAD"), clean=not changed)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or no commit
        return None
