"""What the written programs use: values that a checkpoint holds, strikes, and what is left of a program at its end."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset


class Killed(BaseException):
    """Ends a program as if its process were killed."""


class StruckError(Exception):
    """Ends a program as a mistake in it does."""


class Kept(dict[str, float]):
    """Values by name, 0 at first, that go into checkpoints."""

    def __missing__(self, name: str) -> float:
        return 0

    def state_dict(self) -> dict[str, float]:
        return dict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.clear()
        self.update(state)


class Augmented(TensorDataset):
    """Changes samples at random."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(4), y


class Strike(NamedTuple):
    """``kind`` happens in the life-th process of a program, when it comes to a place for the time-th time."""

    kind: str
    life: int
    time: int


class Strikes:
    """``strike(2)`` in a program is the place of strike 2. In the uninterrupted program nothing happens there."""

    def __init__(self, *strikes: Strike) -> None:
        self.planned = strikes
        self.run: Any = None
        self.life = -1
        self.begin()

    def begin(self) -> None:
        """Begin the next life."""
        self.life += 1
        self.struck = False
        self._times: Counter[int] = Counter()

    def __call__(self, number: int) -> None:
        if number >= len(self.planned):
            return
        self._times[number] += 1
        kind, life, time = self.planned[number]
        if (life, time) == (self.life, self._times[number]):
            self.struck |= kind != "save"
            HAPPENS[kind](self.run)

    def on(self, number: int) -> Callable[[Any], None]:
        """Return a handler for an event that is the place of a strike."""
        return lambda event: self(number)


def _die(run: Any) -> None:
    raise Killed


def _fail(run: Any) -> None:
    raise StruckError


def _kill(run: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(run: Any) -> None:
    run.stop("enough")


def _stop_by_thread(run: Any) -> None:
    thread = threading.Thread(target=run.stop)
    thread.start()
    thread.join()


def _terminate(run: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _save_by_thread(run: Any) -> None:
    thread = threading.Thread(target=run.checkpoints.save)
    thread.start()
    thread.join()


HAPPENS = {
    "save": _save_by_thread,
    "die": _die,
    "fail": _fail,
    "kill": _kill,
    "stop": _stop,
    "thread": _stop_by_thread,
    "term": _terminate,
}


class Said:
    """What a program prints, ``say("mean", epoch, value)``, in a file that its next process goes on with."""

    def __init__(self, folder: Path) -> None:
        self._file = folder.with_name("said.jsonl")
        self._file.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, what: str, epoch: int, *values: float) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([f"{what} {epoch}", values]) + "\n")

    def all(self) -> dict[str, list[float]]:
        """Return what was printed; of what was printed again, the last."""
        return dict(map(json.loads, self._file.read_text().splitlines())) if self._file.exists() else {}


def left(run: Any, said: Said, **parts: Any) -> dict[str, Any]:
    """Return what is left of a program: the states of its parts, the random states, the counts, the best file."""
    best = run.checkpoints.best
    averages = [hook.average for hook in run.bus.hooks if getattr(hook, "average", None) is not None]
    return {
        "averages": [dict(one.tensors) for one in averages],
        "random": {"torch": torch.get_rng_state(), "numpy": np.random.get_state()[1:3], "python": random.getstate()[1]},
        "counts": {name: getattr(run.progress, name) for name in ("epoch", "iter", "update")},
        "best": None if best is None else {"path": best.path, "score": best.score},
        "said": said.all(),
        "lines": getattr(run, "lines", None),
        **{name: part.state_dict() for name, part in parts.items()},
    }
