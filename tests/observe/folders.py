"""Folders of runs, written by hand."""

import json
from pathlib import Path
from typing import Any

import msgspec

from trainbus.observe import (
    Costs,
    Durations,
    Environment,
    LaneCosts,
    Part,
    RunManifest,
    RunSession,
    encode_line,
    write_manifest,
)
from trainbus.observe.environment import Computer, Git, Process

BEGAN = 1764000000.0
GONE = Process(pid=2**22 + 1, host="elsewhere", boot="b", began="1")
HERE = Environment(
    command=["python", "train.py", "--lr=0.1"],
    folder="/home/ada",
    process=GONE,
    machine=Computer("elsewhere", "Linux", "AMD EPYC", 8, 64 << 30, ["NVIDIA H200"]),
    versions={"python": "3.12.1", "torch": "2.11.0", "trainbus": "0.1.0"},
    git=Git("0123456789abcdef", "main", clean=False),
)


def session(began: float = BEGAN, lasted: float | None = 100.0, **fields: Any) -> RunSession:
    state = {"state": "finished"} if lasted is not None else {}
    ended = None if lasted is None else began + lasted
    return RunSession(**{"began": began, "environment": HERE, "ended": ended, "stages": ["train"]} | state | fields)


def some_costs(wall: float = 10.0, iterations: int = 100) -> Costs:
    """Costs with a hook of 11 %, a lane that dropped two events, and data of 30 %."""
    shares = {"forward": 0.5, "waiting for data": 0.3, "rest": 0.09}
    parts = [Part("training", name, 0, share * wall, share) for name, share in shares.items()]
    hook = "Histograms.after_train_iter"
    parts.insert(2, Part("hook", hook, iterations, 0.11 * wall, 0.11, 0.22 * wall / iterations, "after_train_iter"))
    lanes = [LaneCosts("LoggerHook.write", ["after_train_iter"], iterations - 2, 0, 2, 0, 0.5, 0.0, 1.5, 7, 0.01, 0.2)]
    return Costs(wall=wall, parts=parts, steps=Durations({212: iterations - 10, 220: 10}, wall), lanes=lanes)


def costs_line(time: float, costs: Costs, epoch: int = 1, iteration: int = 100) -> dict[str, Any]:
    return {"time": time, "kind": "costs", "epoch": epoch, "iter": iteration, **msgspec.to_builtins(costs, str_keys=True)}


def write_record(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "record.jsonl").open("ab") as file:
        file.writelines(encode_line(line) for line in lines)


def write_scalars(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "scalars.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def loss_lines(number: int, begin: int = 1, began: float = BEGAN, per_epoch: int = 10) -> list[dict[str, Any]]:
    return [
        {"step": i, "epoch": (i - 1) // per_epoch + 1, "iter": i, "time": began + i, "train/loss": 1 / i}
        for i in range(begin, begin + number)
    ]


def entry(after: float, kind: str, epoch: int = 5, iteration: int = 50, **fields: Any) -> dict[str, Any]:
    """A line of the record, so many seconds after the run began."""
    return {"time": BEGAN + after, "kind": kind, "epoch": epoch, "iter": iteration, **fields}


def write_run(folder: Path, *sessions: RunSession, name: str = "digits", config: dict[str, Any] | None = None) -> Path:
    """Write a whole run: run.json, a record with one line of every kind, and the scalars of 100 iterations."""
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(
        folder, RunManifest(name=name, seed=3, config=config or {}, sessions=list(sessions or [session(epoch=10, iter=100)]))
    )
    write_record(
        folder,
        entry(0, "resume", 0, 0, path="/runs/a/epoch_1.safetensors"),
        entry(10, "checkpoint", names=["/a/epoch_5.safetensors"], bytes=1000, stall=0.25, seconds=2.0),
        entry(20, "checkpoint_failed", names=["/a/iter_51.safetensors"], reason="the disk is full"),
        entry(21, "checkpoint_skipped", names=["/a/iter_52.safetensors"], reason="one is being written"),
        entry(30, "validation", metrics={"accuracy": 0.9}, seconds=1.5),
        entry(60, "validation", 8, 80, metrics={"accuracy": 0.8}, seconds=1.5),
        entry(70, "test", 10, 100, metrics={"accuracy": 0.85}, seconds=1.5),
        costs_line(BEGAN + 50, some_costs(5.0, 50), 5, 50),
        costs_line(BEGAN + 100, some_costs(), 10, 100),
        *([entry(100, "end", 10, 100, state="finished", reason="")] if not sessions or sessions[-1].ended else []),
    )
    write_scalars(folder, *loss_lines(100))
    return folder
