"""Measure the time that logging six scalars takes on the training thread at every iteration.

All contenders write all six at every iteration: first floats, then 0-dim tensors, as a step returns them. Contenders that
write on another thread get the time for it between the samples. The others write within the measured time.
"""

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from timeit import Timer
from types import ModuleType

import torch

from benchmarks.harness import Budget, Comparison, Sample, Settings, measure, one_thread
from benchmarks.peers import Logged, Logs, direct, handwritten, load, trainbus

PEERS = ("tensorboard", "mmengine", "mlflow")
LEFT_OUT = {"wandb": "it is not installed, and by default it needs its service"}
NAMES = ("loss", "accuracy", "grad_norm", "lr", "time", "data_time")
SECONDS_PER_SAMPLE = 0.002
MOST = 200  # iterations per sample; with those before, less than a third of what a lane holds
WARM = 100  # iterations before each sample, because the previous contender left its code and data in the caches
AWAKE = 0.002  # seconds after which a woken consumer waits for more, as usual beside a step


def run(settings: Settings) -> list[Comparison]:
    floats = {name: 0.5 + index / 7 for index, name in enumerate(NAMES)}
    tensors = {name: torch.tensor(value) for name, value in floats.items()}
    with one_thread():
        return [
            compare(settings, 0, floats, direct.six_floats, "an empty function", Budget(8, 50, seconds=1e-6)),
            compare(settings, 1, tensors, direct.six_tensors, "one foreach copy", Budget(8, 2.0)),
        ]


def compare(
    settings: Settings, part: int, scalars: Mapping[str, object], ground: Logs, floor: str, budget: Budget
) -> Comparison:
    modules, left_out = load(PEERS)
    kind = type(next(iter(scalars.values()))).__name__.lower()
    title = f"Six {'0-dim tensors' if kind == 'tensor' else 'floats'} logged at every iteration, on the training thread"
    with ExitStack() as scopes:
        contenders: dict[str, Sample] = {}
        for name, logs in {floor: ground, **trainbus.LOGS, **handwritten.LOGS, **all_logs(modules)}.items():
            work_dir = Path(scopes.enter_context(tempfile.TemporaryDirectory(prefix="trainbus-bench-")))
            contenders[name] = timed(scopes.enter_context(logs(work_dir, scalars)))
        rounds = settings.rounds(quick=5, full=40)
        samples = measure(contenders, rounds, lambda done, of: settings.tick_part(part, 2, done, of))
    return Comparison(title, "µs", floor, samples, budget=budget, left_out=left_out | LEFT_OUT)


def all_logs(modules: Mapping[str, ModuleType]) -> dict[str, Logs]:
    return {name: logs for module in modules.values() for name, logs in module.LOGS.items()}


def timed(logged: Logged) -> Sample:
    timer = Timer(logged.statement.code, globals=dict(logged.statement.names), timer=time.perf_counter)
    trial = 20
    fastest = min(timer.timeit(trial) for _ in range(5)) / trial
    number = max(1, min(MOST, round(SECONDS_PER_SAMPLE / fastest)))
    logged.settle()

    def sample() -> float:
        timer.timeit(1)
        time.sleep(AWAKE)
        timer.timeit(min(number, WARM))
        seconds = timer.timeit(number) / number
        logged.settle()
        return seconds

    return sample
