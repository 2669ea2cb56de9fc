"""``trainbus run``: train what a configuration describes, in a new folder or in one to resume."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from eventloop.checkpoint import as_path
from eventloop.cli.common import check_kind
from eventloop.config import SUFFIXES, Setup, find_files_in, override, read, shortened
from eventloop.errors import ConfigurationError, TrainbusError
from eventloop.training.distributed.launch import from_first, process_group
from eventloop.training.distributed.ranks import this_rank
from eventloop.training.loop import TrainLoop


def run(
    config: Path,
    /,
    *changes: Annotated[str, Parameter(name="CHANGE")],
    dry_run: bool = False,
    resume: Annotated[str | None, Parameter(metavar="[RUN]")] = None,
) -> int:
    """Train what a configuration file describes.

    CHANGE is key=value, such as loop.max_epochs=3, model.width=64, custom_hooks[0].interval=5 or
    default_hooks.checkpoint=false; the value gets its type from the option it is for. Modules that the configuration
    imports are looked for among the installed ones, beside the configuration, and in the current folder.

    A configuration is a program: it imports the modules that it lists under imports and calls what it names in them, with
    your rights. Run only those that you trust, as with a script.

    Several processes: torchrun --nproc-per-node N -m trainbus run CONFIG

    Args:
        config: a .toml, .yaml or .json file.
        changes: of single keys, as key=value; see above.
        dry_run: make everything and show the hook table, but do not train.
        resume: resume a run. Without a value (or with auto): the newest run of this configuration, or the one in
            loop.work_dir. With a folder: the run in it. With a checkpoint file or URL: from it, in a new folder.
    """
    from hooks.defaults import DEFAULT_HOOKS

    folders = find_files_in(config.parent, Path.cwd())
    setup = Setup(override(read(config), changes), default_hooks=DEFAULT_HOOKS, folders=folders)
    with process_group():
        console = Console(quiet=this_rank() > 0)
        work_dir, resume = _agreed_work_dir(setup.loop, config, resume)
        setup.loop["work_dir"] = work_dir
        loop = setup.make()
        console.print(f"[bold]trainbus run[/] {config} → {work_dir}", highlight=False)
        if dry_run:
            console.print(loop.bus.describe())
            console.print("not trained (--dry-run)", style="dim")
            return 0
        with resumable(work_dir, f"--resume {work_dir}"):
            _train(loop, work_dir, console, resume=resume, test=setup.tests)
    return 0


def with_auto(words: list[str]) -> list[str]:
    """Return a command line with ``auto`` after a ``--resume`` of ``run`` without a value."""
    if words[:1] != ["run"] or "--resume" not in words:
        return words
    end = words.index("--resume") + 1
    following = words[end] if end < len(words) else "-"
    is_change = "=" in following and "/" not in following.partition("=")[0]
    if following.startswith("-") or is_change or Path(following).suffix.lower() in SUFFIXES:
        return [*words[:end], "auto", *words[end:]]
    return words


def _agreed_work_dir(loop: dict[str, Any], config: Path, resume: str | None) -> tuple[Path, str | None]:
    """Return the folder of the run and what to resume, as rank 0 finds them before any rank writes files."""
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
    if resume is not None:
        path = as_path(resume)
        if Path(resume).is_dir():
            return to_resume(Path(resume), default), "auto"
        if not path.exists() and not path.is_dir():  # remote folders only exist as a part of files' names
            way_out = f"without a value, --resume resumes the newest run in {default.parent}/"
            raise ConfigurationError(f"--resume {path}: no such file or folder; {way_out}")
        if not path.is_dir():
            check_kind(path)
    return free(default if chosen is None else Path(chosen)), resume


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


# ------------------------------------------------------------------------------------------------------ folders of runs


def free(wanted: Path) -> Path:
    """Return ``wanted``, or the first of ``wanted-2``, ``wanted-3`` … that is empty or missing."""
    candidate, number = wanted, 1
    try:
        while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
            if wanted.name in ("", ".."):
                own = f"a run needs a folder of its own, such as {wanted / 'run'}"
                raise ConfigurationError(f"{wanted} is not empty, and {own}")
            number += 1
            candidate = wanted.with_name(f"{wanted.name}-{number}")
    except OSError as error:
        raise ConfigurationError(f"{shortened(str(candidate))}: cannot be used: {error.strerror}") from None
    return candidate


def to_resume(folder: Path | None, default: Path) -> Path:
    """Return ``folder``, or the run with the highest number among ``default`` and its numbered siblings.

    The number decides, because the times of copied files are wrong.
    """
    own = re.compile(rf"{re.escape(default.name)}(?:-(\d+))?")  # not the runs of a configuration with a longer name
    siblings = ((own.fullmatch(run.name), run) for run in default.parent.glob("*"))
    numbered = sorted((int(match[1] or 1), run) for match, run in siblings if match is not None)
    runs = [folder] if folder is not None else [run for _, run in numbered]
    found = [run for run in runs if (run / "last_checkpoint").is_file()]
    if not found:
        missing = f"there is nothing to resume in {folder or default.parent}: no last_checkpoint"
        raise ConfigurationError(f"{missing}; run without --resume")
    return found[-1]


@contextmanager
def resumable(work_dir: Path, arguments: str) -> Iterator[None]:
    """Make the folder of a run; add the ``arguments`` that resume it as a note to Ctrl-C."""
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{work_dir}: cannot make this folder: {error.strerror}") from None
    try:
        yield
    except KeyboardInterrupt as interrupt:
        saved = (work_dir / "last_checkpoint").exists()
        interrupt.add_note(f"goes on from the last checkpoint with {arguments}" if saved else "before the first checkpoint")
        raise
