"""The training that ``crash.py`` kills. It saves after each iteration, and every number in its state identifies the step.

After t steps each weight is t (t + 1) / 2 and each momentum -t (gradient -1, learning rate 1, momentum 1), and each number
of the buffer ``seen`` is t, all exact in float64; a checkpoint that mixes two steps shows. ``chain`` is a digest of all random
draws and of the order of the data so far, so it shows a run that did not resume bitwise.
"""

import json
import os
import random
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainbus.eventloop import Bus, Hook, TrainLoop
from trainbus.hooks import CheckpointHook

KEEP = 2
VAL_INTERVAL = 4
SHAPES = ((64, 64), (1000,), (3, 5, 7), (), (20_000,))


class Told(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES])
        self.register_buffer("seen", torch.zeros(5000, dtype=torch.float64))
        self.register_buffer("chain", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            drawn = (int(self.chain), batch.tolist(), torch.rand(2).tolist(), random.random(), np.random.rand())
            self.chain.fill_(zlib.crc32(repr(drawn).encode()))
        return -sum(weight.sum() for weight in self.weights)


class Score:
    """The metric: every second validation is the best so far."""

    def __init__(self, seen: torch.Tensor) -> None:
        self.seen = seen

    def update(self) -> None: ...

    def reset(self) -> None: ...

    def compute(self) -> float:
        return score(int(self.seen[0]))


def score(step: int) -> float:
    number = step // VAL_INTERVAL
    return number + 3.0 * (number % 2)


class Teller(Hook):
    """Write each event to a pipe, one line each. The pipe keeps its lines when the process is killed."""

    priority = 0  # before anything is deleted

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.count = 0

    def tell(self, **line: Any) -> None:
        os.write(self.pipe, json.dumps(line).encode() + b"\n")

    def before_train(self, event: Any) -> None:
        self.tell(began=event.progress.iter)

    def after_train_iter(self, event: Any) -> None:
        self.count += 1

    def checkpoint_staged(self, event: Any) -> None:
        self.tell(staged=Path(event.path).name)

    def checkpoint_committed(self, event: Any) -> None:
        self.tell(committed=[Path(name).name for name in event.names])

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def make_loop(*hooks: Hook, work_dir: Path | None = None, steps: int = 1_000_000) -> TrainLoop:
    model = Told()
    bus = Bus()
    bus.add(*hooks)
    return TrainLoop(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0),
        step=lambda model, batch: model(batch),
        train_data=DataLoader(list(range(40)), batch_size=8, shuffle=True),
        val_data=[torch.zeros(1)],
        metrics={"score": Score(model.seen)},
        bus=bus,
        max_iters=steps,
        val_interval=VAL_INTERVAL,
        work_dir=work_dir,
        seed=1,
    )


def saving(staging: str = "block") -> Hook:
    """Return a hook that saves after each iteration, and the best checkpoint after every second validation."""
    return CheckpointHook(1, by_epoch=False, max_keep_ckpts=KEEP, save_best="score", rule="greater", staging=staging)


def train_until_killed(work_dir: Path, pipe: int, staging: str) -> NoReturn:
    """Train in a forked process until it is killed."""
    log = os.open(work_dir.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        make_loop(Teller(pipe), saving(staging), work_dir=work_dir).run(resume="auto")
    except BaseException:  # noqa: BLE001 - the exit status tells the parent
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)  # it never ends by itself


def chains(steps: int) -> dict[int, int]:
    """Return ``chain`` after each step of an uninterrupted run."""
    found: dict[int, int] = {}
    loop = make_loop(steps=steps)
    loop.bus.on("after_train_iter", lambda event: found.update({event.progress.iter + 1: int(loop.model.chain)}))
    loop.run()
    return found
