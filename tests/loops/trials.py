"""Run a program without trainbus, with it, and struck and resumed; compare what is left of it."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from structlog.testing import capture_logs

import trainbus
from trainbus.eventloop import checkpoint

from . import plain
from .kit import Killed, Strike, Strikes, StruckError

LIVES = 8


class ControlError(Exception):
    """A program fails without trainbus."""


Train = Callable[[Any, Strikes, Path], dict[str, Any]]


@dataclass
class Verdict:
    """What a trial showed. Each difference is ``"part: how"``."""

    where: str = ""
    differences: list[str] = field(default_factory=list)
    error: BaseException | None = None
    told: list[str] = field(default_factory=list)
    lives: int = 0

    @property
    def exact(self) -> bool:
        return not self.differences and self.error is None

    @property
    def kind(self) -> str:
        """The parts that differ, or the error's class."""
        if self.error is not None:
            return f"{self.where}: {type(self.error).__name__}"
        return f"{self.where}: " + ", ".join(sorted({text.split(":")[0].split(".")[0] for text in self.differences}))

    def __str__(self) -> str:
        told = "".join(f"\n  told: {text}" for text in dict.fromkeys(self.told))
        if self.error is not None:
            trace = "".join(traceback.format_exception(self.error)[-6:])
            return f"{self.where}: {trace}{told}"
        return "\n  ".join([self.where or "exact", *self.differences[:12]]) + told


class Life(NamedTuple):
    """What one process of a program left: ``left`` at its end, None if it was killed; the error; whether it was struck."""

    left: dict[str, Any] | None
    error: Exception | None
    struck: bool
    told: list[str]


def tried(
    train: Train, strikes: Sequence[Strike], folder: Path, *, again: bool = False, live: Callable[..., Life] | None = None
) -> Verdict:
    """Run a program in the three ways; return the first difference.

    Args:
        train: the program.
        strikes: what strikes it.
        folder: an empty folder.
        again: start the finished program once more.
        live: runs a process of the program; here, by default.
    """
    try:
        control = train(plain, Strikes(), folder / "plain" / "run")
    except Exception as error:
        raise ControlError from error
    whole = lived(train, Strikes(), folder / "whole")
    if whole.left is None:
        return Verdict("uninterrupted", error=whole.error, told=whole.told)
    whole.left["lines"] = lines_in(folder / "whole")
    if found := against_control(control, whole.left):
        return Verdict("uninterrupted", found, told=whole.told)
    strike, told = Strikes(*strikes), list[str]()
    for number in range(1, LIVES):
        life = (live or partial(lived, train))(strike, folder / "struck")
        told += life.told
        if life.error is not None:
            return Verdict(f"life {number}", error=life.error, told=told, lives=number)
        strike.begin()
        if life.left is not None and not life.struck:
            if not again:
                life.left["lines"] = lines_in(folder / "struck")
                return Verdict("resumed", resumed_differences(whole.left, life.left), told=told, lives=number)
            again = False
    return Verdict("resumed", [f"lives: more than {LIVES}"], told=told, lives=LIVES)


def lived(train: Train, strike: Strikes, folder: Path) -> Life:
    """Run one process of a program, here."""
    left: dict[str, Any] | None = None
    failure: Exception | None = None
    with capture_logs() as entries, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            left = train(trainbus, strike, folder / "run")
        except (Killed, StruckError, trainbus.errors.RunPreempted):
            pass
        except Exception as error:  # noqa: BLE001 - told by the caller
            failure = error
    told = [str(one["event"]) for one in entries if one["log_level"] not in ("debug", "info")]
    told += [str(one.message) for one in warned]
    return Life(left, failure, strike.struck, told)


def lived_in_process(source: str, strike: Strikes, folder: Path) -> Life:
    """Run one process of a program, which a strike of the kind ``kill`` kills."""
    result = folder.with_name("life.pt")
    result.unlink(missing_ok=True)
    process = multiprocessing.get_context("forkserver").Process(
        target=_live, args=(source, strike.planned, strike.life, folder, result)
    )
    process.start()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return Life(None, None, True, [])
    return Life(*torch.load(result, weights_only=False))


def _live(source: str, planned: Sequence[Strike], life: int, folder: Path, result: Path) -> None:
    torch.set_num_threads(1)
    strike = Strikes(*planned)
    strike.life = life
    torch.save(tuple(lived(compiled(source), strike, folder)), result)


def compiled(source: str) -> Train:
    """Return the function ``train`` of a program."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "<program>", "exec"), space)  # noqa: S102 - our own source
    train: Train = space["train"]
    return train


def against_control(control: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    """Return how an uninterrupted program with trainbus differs from the one without."""
    found = differences(drop(control, "lines", "best", "counts"), drop(whole, "lines", "best", "counts"))
    if control["counts"]["update"] != whole["counts"]["update"]:
        found.append(f"counts.update: {control['counts']['update']}, then {whole['counts']['update']}")
    for stage in ("train", "val"):
        before = once(values for kind, values in control["lines"] if kind == stage and values)
        now = once(line["values"] for line in whole["lines"] if line["stage"] == stage)
        if not close(before, now):
            found.append(f"lines.{stage}: {before}, then {now}")
    return found


def once(lines: Iterable[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Leave out lines that are the same as the one before: a writer takes them for repeated ones."""
    return [line for line, _ in groupby(lines)]


def close(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one.keys() == other.keys() and all(abs(one[key] - other[key]) <= 1e-5 * (1 + abs(one[key])) for key in one)


def resumed_differences(whole: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    found = differences(drop(whole, "lines", "best"), drop(result, "lines", "best"))
    found += [f"best{text}" for text in differences(best_of(whole), best_of(result))]
    for line in [one for one in result["lines"] if one not in whole["lines"]]:
        found.append(f"lines: {line} is new")
    for line in [one for one in whole["lines"] if one not in result["lines"]]:
        found.append(f"lines: {line} is missing")
    return found


def best_of(left: Mapping[str, Any]) -> Any:
    best = left["best"]
    if best is None:
        return None
    path = Path(str(best["path"]))
    return {"name": path.name, "score": best["score"], "state": checkpoint.load(path)["state_dict"]}


def drop(left: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in left.items() if name not in names}


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """Return the scalars that the program logged in a folder, each once."""
    found: list[dict[str, Any]] = []
    for file in sorted(folder.rglob("scalars.jsonl")):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            names = [name for name in line if "/" in name]
            stage = "val" if any(name.startswith("val/") for name in names) else "train"
            values = {name.split("/")[1]: line[name] for name in names if name.split("/")[1] in REPORTED}
            where = {"stage": stage, "values": values, **{key: line[key] for key in ("step", "epoch", "iter")}}
            if values and where not in found:
                found.append(where)
    return found


REPORTED = ("loss", "critic_loss", "error", "extra", "noise")


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return how two states differ, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        if same:
            return []
        by = (one.double() - other.double()).abs().max().item() if one.shape == other.shape else "its shape"
        return [f"{path}: differs by {by}"]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = dict.fromkeys([*one, *other])
        return [
            text
            for key in keys
            for text in (
                differences(one[key], other[key], f"{path}.{key}" if path else str(key))
                if key in one and key in other
                else [f"{path}.{key}: only {'before' if key in one else 'now'}"]
            )
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other) < 100:
        return [text for i, (a, b) in enumerate(zip(one, other, strict=True)) for text in differences(a, b, f"{path}.{i}")]
    same = type(one) is type(other) and equal(one, other)
    short = f"{one!r}, then {other!r}" if len(repr(one)) < 200 else "other values"
    return [] if same else [f"{path}: {short}"]


def equal(one: Any, other: Any) -> bool:
    if hasattr(one, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other or (one != one and other != other))


def main(train: Train, strikes: Sequence[tuple[str, int, int]], *, again: bool) -> None:
    """Try the program of a script, and print what was found."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    try:
        print(tried(train, [Strike(*one) for one in strikes], folder, again=again))  # noqa: T201 - a script
    finally:
        shutil.rmtree(folder)
