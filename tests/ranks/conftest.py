"""Runs functions in several processes at once, forked from one that has torch imported: a scenario takes a second."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from ..scripts import start_processes_by_default
from . import jobs


@dataclass
class Outcome:
    """What became of one process."""

    exitcode: int | None
    value: Any = None
    error: str = ""
    output: str = ""
    notes: list[str] = field(default_factory=list)


def on_ranks(
    function: Callable[..., Any], *args: Any, folder: Path, size: int = 2, timeout: float = 120, group_timeout: float = 1800
) -> list[Outcome]:
    """Call ``function(*args)`` in ``size`` processes of one gloo group (in one without a group, if it is one)."""
    context = multiprocessing.get_context("forkserver")
    folder = folder / f"{function.__name__}_{time.monotonic_ns()}"
    folder.mkdir()
    place = (size, str(folder), timedelta(seconds=group_timeout))
    processes = [context.Process(target=_child, args=(rank, *place, function, args)) for rank in range(size)]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hung = [process for process in processes if process.exitcode is None]
    for process in hung:
        process.kill()
        process.join()
    assert not hung, f"{len(hung)} of {size} processes hung in {function.__name__}: {_outputs(folder)}"
    return [_outcome(folder, rank, process.exitcode) for rank, process in enumerate(processes)]


def _child(rank: int, size: int, folder: str, timeout: timedelta, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    output = os.open(f"{folder}/{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    start_processes_by_default()
    outcome, code = Outcome(0), 0
    if size > 1:
        where = f"file://{folder}/rendezvous"
        distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timeout)
        distributed.barrier()  # one that has connected and ends at once would break the other's connecting
    try:
        outcome.value = function(*args)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test looks at it
        outcome.error, outcome.notes, code = f"{type(error).__name__}: {error}", list(getattr(error, "__notes__", [])), 1
        traceback.print_exc()
    Path(f"{folder}/{rank}.pickle").write_bytes(pickle.dumps(outcome))
    if distributed.is_initialized() and not code:
        jobs.destroy_group()
    elif code:  # a script takes as long to end; one that ends at once may reset a connection that another still reads
        end = time.monotonic() + 0.5
        while len(list(Path(folder).glob("*.pickle"))) < size and time.monotonic() < end:
            time.sleep(0.01)
    os._exit(code)  # as a script that ends: nothing of the test runner's is to run here


def _outcome(folder: Path, rank: int, exitcode: int | None) -> Outcome:
    file = folder / f"{rank}.pickle"
    outcome: Outcome = pickle.loads(file.read_bytes()) if file.exists() else Outcome(exitcode)  # noqa: S301 - ours
    outcome.exitcode = exitcode
    outcome.output = (folder / f"{rank}.out").read_text()
    return outcome


def _outputs(folder: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(folder.glob("*.out")))


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """``ranks(function, *args, size=2)`` returns what the function returned on each rank."""

    def call(function: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
        outcomes = on_ranks(function, *args, folder=tmp_path, size=size)
        assert [one.exitcode for one in outcomes] == [0] * size, "\n".join(one.output for one in outcomes)
        return [one.value for one in outcomes]

    return call


@pytest.fixture
def outcomes(tmp_path: Path) -> Callable[..., list[Outcome]]:
    """The same for those that may fail: returns an ``Outcome`` of each rank."""
    return lambda function, *args, **options: on_ranks(function, *args, folder=tmp_path, **options)
