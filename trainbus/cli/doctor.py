"""``trainbus doctor``: what a question about trainbus needs, and what is wrong on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Final

from rich import filesize
from rich.console import Console
from rich.table import Table

from trainbus.cli.common import to_terminal, write_json
from trainbus.eventloop import platform
from trainbus.eventloop.errors import TrainbusError
from trainbus.eventloop.plain import without_secrets
from trainbus.eventloop.terminal import cell
from trainbus.eventloop.user_errors import described
from trainbus.observe.environment import environment

_ENGINES: Final = ("ray", "torchft-nightly", "nvidia-resiliency-ext")
_HOSTS: Final = (
    "lightning",
    "transformers",
    "accelerate",
    "pytorch-ignite",
    "mmengine",
    "ray",
    "torchft-nightly",
    "nvidia-resiliency-ext",
)
_STORES: Final = ("fsspec", "s3fs", "gcsfs", "adlfs", "obstore")
_WRITERS: Final = ("tensorboard", "wandb", "mlflow")
_CORE: Final = ("anyio", "msgspec", "structlog", "orjson", "numpy", "uvloop", "trio", "safetensors")
_GROUP: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONPATH",
    "AWS_ENDPOINT_URL",
    "SLURM_JOB_ID",
    "TRAINBUS_LOG",
)
_LEAST: Final = 1 << 30
"""Free bytes below which a folder is a problem."""


def doctor(config: Path | None = None, /, *, json: bool = False) -> int:
    """Print what a question about trainbus needs: versions, machine, devices, disks, variables, and what is wrong.

    Exit status 1: there is a problem. No secrets are printed.

    Args:
        config: a configuration to check, too: names, types and options. It imports the modules that the file names.
        json: print JSON.
    """
    found = _facts()
    problems = [*_problems(), *([] if config is None else _of_config(config))]
    if json:
        write_json({**found, "problems": problems})
    else:
        _print(found, problems, to_terminal())
    return 1 if problems else 0


def _facts() -> dict[str, dict[str, Any]]:
    import torch

    here = environment()
    machine = here.machine
    return {
        "versions": {**here.versions, **_installed(_CORE)},
        "trainers and engines": _installed(_HOSTS),
        "stores and writers": _installed((*_STORES, *_WRITERS)),
        "machine": {
            "system": machine.system,
            "processor": machine.processor,
            "cores": machine.cores,
            "threads of torch": torch.get_num_threads(),
            "memory": filesize.decimal(machine.memory),
            "accelerators": ", ".join(machine.gpus) or "none",
        },
        "free disk": {name: filesize.decimal(shutil.disk_usage(path).free) for name, path in _disks()},
        "process group": {name: os.environ[name] for name in _GROUP if name in os.environ},
        "variables": without_secrets({name: os.environ[name] for name in _VARIABLES if name in os.environ}),
        "process": {
            "python": sys.executable,
            "git": "none" if here.git is None else here.git.commit[:12],
            "folder": here.folder,
        },
    }


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _disks() -> Iterator[tuple[str, Path]]:
    yield "this folder", Path.cwd()
    yield "temporary files", Path(tempfile.gettempdir())
    if (shared := platform.shared_memory()) is not None:
        yield "shared memory", shared


def _problems() -> Iterator[str]:
    """Look for what commonly goes wrong; each line says what to do."""
    import torch

    for name, path in _disks():
        if (free := shutil.disk_usage(path).free) < _LEAST:
            what = "workers of loaders pass batches in it" if name == "shared memory" else "checkpoints need room"
            yield f"{name} ({path}) has only {filesize.decimal(free)} left, and {what}: make room, or use another one"
    if not os.access(Path.cwd(), os.W_OK):
        yield f"{Path.cwd()} cannot be written, so a run needs work_dir= elsewhere"
    cores, limit = platform.cores(), platform.cores_of_container()
    if torch.get_num_threads() > min(cores, limit or cores):
        usable = min(cores, limit or cores)
        yield f"torch uses {torch.get_num_threads()} threads on {usable:g} cores: set OMP_NUM_THREADS={max(1, int(usable))}"
    if "WORLD_SIZE" in os.environ and "MASTER_ADDR" not in os.environ:
        yield "WORLD_SIZE is set without MASTER_ADDR: start the processes by torchrun, or unset it"
    for module in ("trainbus.eventloop", "trainbus.hooks"):
        try:
            found = import_module(module)
            for name in found.__all__:
                getattr(found, name)
        except Exception as error:  # noqa: BLE001 - which is what to tell
            yield f"{module} cannot be imported: {described(error)}"
    yield from _too_old()


def _too_old() -> Iterator[str]:
    """Yield the libraries whose versions are outside of what the extras of this installation ask for."""
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(one) for one in metadata.requires("trainbus") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        return
    told = set()
    for one in wanted:
        with suppress(metadata.PackageNotFoundError):
            if not one.specifier.contains(version := metadata.version(one.name), prereleases=True) and one.name not in told:
                told.add(one.name)
                yield f"{one.name} {version} is installed, and trainbus is tested with {one.name}{one.specifier}"


def _of_config(config: Path) -> list[str]:
    from trainbus.config import Setup, read
    from trainbus.config.defaults import DEFAULT_HOOKS

    try:
        Setup(read(config), default_hooks=DEFAULT_HOOKS, folders=(config.parent, Path.cwd()))
    except (TrainbusError, OSError) as error:
        return [f"{config}: {error}"]
    return []


def _print(found: Mapping[str, Mapping[str, Any]], problems: list[str], console: Console) -> None:
    for title, facts in found.items():
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(cell(f"  {name}", "dim"), cell(str(value)))
        console.print(cell(title, "bold"))
        console.print(table if facts else cell("  none", "dim"))
    console.print(cell("problems" if problems else "no problem found", "bold red" if problems else "bold green"))
    for problem in problems:
        console.print(cell(f"  {problem}"), soft_wrap=True)
