"""Measure what everything on costs in a training of environment steps, in cleanrl's shape of DQN: small iterations of Python.

An iteration acts (by the network, or at random), steps the environment and keeps the transition; each tenth trains on 128 of
them. On is: the loss of each 100 iterations and the lengths of episodes in a file, an exponential moving average of the network
at each update, and a checkpoint every 1,000 iterations of both networks, their average and the optimizer. The hand-written loop
has the same by ``torch.save`` and a list of JSON lines. The clock starts at the first iteration and stops when all is written.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

from benchmarks.harness import SUBJECT, Budget, Comparison, Sample, Settings, measure, one_thread
from trainbus import Bus, CheckpointHook, EMAHook, JSONLinesWriter, LoggerHook, Run

FLOOR, HAND_WRITTEN = "the loop alone", "hand-written loop"
BATCH, SIZE, GAMMA, TRAINS_EACH, TARGET_EACH, LOGS_EACH, SAVES_EACH, MOMENTUM = 128, 10_000, 0.99, 10, 500, 100, 1000, 0.001


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))


class Job:
    """A pole on a cart (Barto, Sutton and Anderson 1983, with the constants of Gym's CartPole), and the learner."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.rng = np.random.default_rng(1)
        self.q, self.target = network(), network()
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=2.5e-4)
        shapes = {"obs": (SIZE, 4), "next": (SIZE, 4), "action": (SIZE, 1), "reward": (SIZE,), "ended": (SIZE,)}
        self.buffer = {name: np.zeros(shape, np.int64 if name == "action" else np.float32) for name, shape in shapes.items()}
        self.length, self.state = 0, self.rng.uniform(-0.05, 0.05, 4)
        self.started = 0.0

    def move(self, action: int) -> tuple[np.ndarray, bool]:
        x, speed, angle, turn = self.state
        force, cosine, sine = (10.0 if action else -10.0), np.cos(angle), np.sin(angle)
        pushed = (force + 0.05 * turn**2 * sine) / 1.1
        bends = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        pulled = pushed - 0.05 * bends * cosine / 1.1
        self.state = np.array([x + 0.02 * speed, speed + 0.02 * pulled, angle + 0.02 * turn, turn + 0.02 * bends])
        self.length += 1
        return self.state.astype(np.float32), bool(
            abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2095 or self.length >= 500
        )

    def iteration(self, step: int) -> tuple[torch.Tensor | None, int | None]:
        """Return the loss, if this one trains, and the length of the episode, if one has ended."""
        self.started = self.started or time.perf_counter()
        before = self.state.astype(np.float32)
        explores = self.rng.random() < 0.5
        action = int(self.rng.integers(2) if explores else self.q(torch.as_tensor(before)).argmax())
        after, ended = self.move(action)
        row = {"obs": before, "next": after, "action": action, "reward": 1.0, "ended": ended}
        for name, value in row.items():
            self.buffer[name][step % SIZE] = value
        loss, length = None, None
        if ended:
            length, self.length, self.state = self.length, 0, self.rng.uniform(-0.05, 0.05, 4)
        if step % TRAINS_EACH == 0:
            chosen = self.rng.integers(min(step + 1, SIZE), size=BATCH)
            batch = {name: torch.as_tensor(rows[chosen]) for name, rows in self.buffer.items()}
            with torch.no_grad():
                best = self.target(batch["next"]).max(dim=1).values
                wanted = batch["reward"] + GAMMA * best * (1 - batch["ended"])
            loss = mse_loss(self.q(batch["obs"]).gather(1, batch["action"]).squeeze(), wanted)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        if step % TARGET_EACH == 0:
            self.target.load_state_dict(self.q.state_dict())
        return loss, length


def alone(job: Job, steps: int, folder: Path) -> None:
    for step in range(steps):
        job.iteration(step)


def by_hand(job: Job, steps: int, folder: Path) -> None:
    weights = [parameter.detach() for parameter in job.q.parameters()]
    average = [weight.clone() for weight in weights]
    with (folder / "scalars.jsonl").open("w") as file:
        last = torch.zeros(())
        for step in range(steps):
            loss, length = job.iteration(step)
            if loss is not None:
                torch._foreach_lerp_(average, weights, MOMENTUM)
                last = loss
            if length is not None:
                file.write(json.dumps({"iter": step, "length": length}) + "\n")
            if (step + 1) % LOGS_EACH == 0:
                file.write(json.dumps({"iter": step, "loss": last.item()}) + "\n")
            if (step + 1) % SAVES_EACH == 0:
                state = {"q": job.q.state_dict(), "target": job.target.state_dict(), "average": average}
                torch.save(state | {"optimizer": job.optimizer.state_dict()}, folder / f"iter_{step + 1}.pt")


def everything(job: Job, steps: int, folder: Path) -> None:
    logs = LoggerHook(interval=LOGS_EACH, writers=[JSONLinesWriter()])
    saves = CheckpointHook(interval=SAVES_EACH, by_epoch=False)
    bus = Bus(EMAHook(model="q", momentum=MOMENTUM), logs, saves)
    with Run(bus, model={"q": job.q, "target": job.target}, optimizer=job.optimizer, work_dir=folder) as run:
        for step in run.iterations(steps):
            loss, length = job.iteration(step)
            if loss is not None:
                run.report(loss=loss)
            if length is not None:
                run.report(length=length)


def bare(job: Job, steps: int, folder: Path) -> None:
    with Run(Bus(), model={"q": job.q, "target": job.target}, optimizer=job.optimizer) as run:
        for step in run.iterations(steps):
            job.iteration(step)


WAYS: dict[str, tuple[Callable[[Job, int, Path], None], Iterable[str]]] = {
    FLOOR: (alone, ()),
    f"{SUBJECT}, no hook": (bare, ()),
    SUBJECT: (everything, ("*.safetensors", "scalars.jsonl")),
    HAND_WRITTEN: (by_hand, ("*.pt", "scalars.jsonl")),
}


def run(settings: Settings) -> list[Comparison]:
    steps = 1000 if settings.quick else 5000
    samples = {name: sample(way, steps, files) for name, (way, files) in WAYS.items()}
    with one_thread():
        found = measure(samples, settings.rounds(quick=2, full=25), settings.tick)
    return [Comparison("An environment step, everything on", "µs", FLOOR, found, budget=Budget("4c", 1.15))]


def sample(train: Callable[[Job, int, Path], None], steps: int, files: Iterable[str]) -> Sample:
    def once() -> float:
        job = Job()
        with tempfile.TemporaryDirectory(prefix="trainbus-bench-") as folder:
            train(job, steps, Path(folder))
            seconds = time.perf_counter() - job.started
            if lacking := [name for name in files if not any(Path(folder).rglob(name))]:
                raise RuntimeError(f"{train.__name__} has not written {lacking}")
        return seconds / steps

    return once
