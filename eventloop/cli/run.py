"""``trainbus run``: train what a configuration describes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eventloop.checkpoint import AnyPath, as_path
from eventloop.cli.arguments import Subparsers
from eventloop.cli.checkpoint.output import check_kind
from eventloop.cli.folders import free, resumable, to_resume
from eventloop.config import SUFFIXES, find_files_in, override, read
from eventloop.config.setup import Setup
from eventloop.errors import ConfigurationError, TrainbusError
from eventloop.training.distributed.launch import from_first, process_group
from eventloop.training.distributed.ranks import this_rank
from eventloop.training.loop import TrainLoop

_MORE = """\
CHANGE is place=value, such as loop.max_epochs=3, model.width=64, custom_hooks[0].interval=5 or
default_hooks.checkpoint=false; the value gets its type from the option it is for. Modules that the configuration
imports are looked for among the installed ones, beside the configuration, and in the current folder. A configuration is a
program: it imports the modules that it lists under imports and calls what it names in them, with your rights. Run only
those that you trust, as with a script.
Several processes: torchrun --nproc-per-node N -m trainbus run CONFIG
"""
_RESUME = """\
go on: in the newest run of this configuration (or that in loop.work_dir); in the run whose folder is given; or, in a new
folder, from the checkpoint file or URL that is given
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = commands.add_parser("run", help="train what a configuration file describes", epilog=_MORE)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a .toml, .yaml or .json file")
    parser.add_argument("changes", nargs="*", default=[], metavar="CHANGE", help="changes to what it says (below)")
    parser.add_argument("--dry-run", action="store_true", help="make everything, show the hook table, and do not train")
    parser.add_argument("--resume", nargs="?", const="auto", metavar="RUN", help=_RESUME)
    parser.set_defaults(call=_run)


def _run(options: argparse.Namespace) -> int:
    from hooks.defaults import DEFAULT_HOOKS

    config_file, *changes = _words(options) or options.parser.error("the following arguments are required: CONFIG")
    path = Path(config_file)
    config = override(read(path), changes)
    folders = find_files_in(path.parent, Path.cwd())
    setup = Setup(config, default_hooks=DEFAULT_HOOKS, folders=folders)
    with process_group():
        console = Console(quiet=this_rank() > 0)
        work_dir, resume = _agreed_work_dir(setup.loop, path, options.resume)
        setup.loop["work_dir"] = work_dir
        loop = setup.make()
        console.print(f"[bold]trainbus run[/] {path} → {work_dir}", highlight=False)
        if options.dry_run:
            console.print(loop.bus.describe())
            console.print("not trained (--dry-run)", style="dim")
            return 0
        with resumable(work_dir, f"--resume {work_dir}"):
            _train(loop, work_dir, console, resume=resume, test=setup.tests)
    return 0


def _words(options: argparse.Namespace) -> list[str]:
    """Return configuration and changes, also the one that ``--resume``, which may stand alone, took for its own."""
    words, taken = [*filter(None, [options.config]), *options.changes], options.resume or ""
    if Path(taken).suffix.lower() in SUFFIXES:
        words, options.resume = [taken, *words], "auto"
    elif "=" in taken and "/" not in taken.partition("=")[0]:
        words, options.resume = [*words, taken], "auto"
    return words


def _agreed_work_dir(loop: dict[str, Any], config: Path, resume: str | None) -> tuple[Path, str | None]:
    """Return the folder of the run and what to resume, as rank 0 finds them: the others would look after it has begun."""
    mine: Any
    try:
        mine = None if this_rank() else _work_dir(loop, config, resume)
    except TrainbusError as error:
        mine = error
    found: tuple[Path, str | None] | TrainbusError = from_first(mine)
    if isinstance(found, TrainbusError):
        raise found
    return found


def _work_dir(loop: dict[str, Any], config: Path, resume: str | None) -> tuple[Path, str | None]:
    chosen = loop.get("work_dir")
    default = Path("runs") / config.stem
    if resume == "auto":
        return to_resume(None if chosen is None else Path(chosen), default), "auto"
    if resume is not None and Path(resume).is_dir():
        return to_resume(Path(resume), default), "auto"
    if resume is not None:
        _check_checkpoint(as_path(resume), default.parent)
    return free(default if chosen is None else Path(chosen)), resume


def _check_checkpoint(path: AnyPath, runs: Path) -> None:
    if path.is_dir():  # of a store: the newest in it
        return
    if not path.exists():
        raise ConfigurationError(
            f"--resume {path}: no such file or folder; without a name, --resume goes on in the newest run in {runs}/"
        )
    check_kind(path)


def _train(loop: TrainLoop, work_dir: Path, console: Console, *, resume: str | None, test: bool) -> None:
    began = time.perf_counter()
    results = {"last validation": loop.run(resume=resume)}
    seconds = time.perf_counter() - began
    if test:
        results["test"] = loop.test()
    table = Table.grid(padding=(0, 2))
    for name, metrics in results.items():
        if metrics:
            table.add_row(name, ", ".join(f"{metric} {_shown(value)}" for metric, value in metrics.items()))
    table.add_row("trained", f"{loop.counters.iter} iterations in all, {seconds:.1f} s in this session")
    table.add_row("files in", str(work_dir))
    console.print()
    console.print(table)


def _shown(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)
