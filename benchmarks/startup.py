"""``python -m benchmarks startup [--rounds N] [--quick]``: how soon a command answers, and a training has its first batch.

Each process is started by itself, all in turn, with compiled modules, as an installation has them. Commands that only read have
300 ms. ``trainbus run`` has 300 ms more than a loop without us that makes the same model and optimizer: that waits for the
import of torch, too, and for what torch imports with the first optimizer. It fails beyond the limits, except with ``--quick``.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Sample, environment, measure

LIMIT = 0.3
ITSELF, TORCH, LOOP, RUN = "python -c pass", "python -c 'import torch'", "a loop's first batch", "trainbus run's first batch"
JOB = """
import os
import torch

data = [torch.ones(4, 2)] * 3


def make_model():
    return torch.nn.Linear(2, 1)


def step(model, batch):
    if "STOPS" in os.environ:
        os._exit(0)
    return model(batch).mean()
"""
BY_HAND = "import job, torch; model = job.make_model(); torch.optim.SGD(model.parameters(), 0.1); job.step(model, job.data[0])"
CONFIGURATION = """
imports = ["job", "torch.optim"]
model = "job:make_model"
optimizer = { type = "torch.optim:SGD", lr = 0.1 }
step = "job:step"
data.train = "job:data"
loop = { max_epochs = 2, work_dir = "runs/job" }
"""
COMMANDS = ("--version", "--help", "runs", "report runs/job", "checkpoint ls runs/job", "run --help")


def process(folder: Path, variables: Mapping[str, str], *words: str) -> Sample:
    command = [sys.executable, *words]
    variables = os.environ | {"PYTHONPYCACHEPREFIX": str(folder / "compiled"), "PYTHONDONTWRITEBYTECODE": ""} | variables

    def sample() -> float:
        began = time.perf_counter()
        subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, check=True)  # noqa: S603
        return time.perf_counter() - began

    return sample


def contenders(folder: Path) -> dict[str, Sample]:
    (folder / "job.py").write_text(JOB)
    (folder / "job.toml").write_text(CONFIGURATION)
    run = ("-m", "trainbus", "run", "job.toml")
    process(folder, {}, *run)()  # the folder that the commands read
    return {
        ITSELF: process(folder, {}, "-c", "pass"),
        **{f"trainbus {words}": process(folder, {}, "-m", "trainbus", *words.split()) for words in COMMANDS},
        TORCH: process(folder, {}, "-c", "import torch"),
        LOOP: process(folder, {"STOPS": "1"}, "-c", BY_HAND),
        RUN: process(folder, {"STOPS": "1"}, *run),
    }


def too_slow(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the commands beyond their limit."""
    figures = {name: statistics.median(samples[name]) for name in map("trainbus {}".format, COMMANDS)}
    figures[RUN] = statistics.median(one - loop for one, loop in zip(samples[RUN], samples[LOOP], strict=True))
    return [f"{name}: {seconds * 1e3:.0f} ms" for name, seconds in figures.items() if seconds > LIMIT]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one round, to see that it runs")
    options = parser.parse_args(arguments)
    where = environment()
    print(f"{where['cpu']}, {where['cores']} cores, {where['python']}, median and minimum in ms")
    with tempfile.TemporaryDirectory() as folder:
        rounds = 1 if options.quick else options.rounds
        samples = measure(contenders(Path(folder)), rounds, lambda done, all_rounds: None)
    for name, times in samples.items():
        print(f"{name:32}{statistics.median(times) * 1e3:8.0f}{min(times) * 1e3:8.0f}")
    more = [one - loop for one, loop in zip(samples[RUN], samples[LOOP], strict=True)]
    print(f"{'trainbus run beside the loop':32}{statistics.median(more) * 1e3:8.0f}{min(more) * 1e3:8.0f}")
    slow = too_slow(samples)
    sys.exit(f"beyond {LIMIT * 1e3:.0f} ms: {', '.join(slow)}" if slow and not options.quick else 0)
