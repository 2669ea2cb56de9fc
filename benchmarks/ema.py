"""One update of an exponential moving average: 10 M parameters in 600 tensors, one thread."""

import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.harness import Budget, Comparison, Sample, Samples, Settings, Tick, in_blocks, measure, one_thread
from benchmarks.peers import load, trainbus

PEERS = ("averaged_model", "mmengine")
FLOOR = "one foreach lerp"
LAYERS, WIDTH = 300, 182
MOMENTUM = 0.001
UPDATES_PER_SAMPLE = 3

Update = Callable[[], None]


def run(settings: Settings) -> list[Comparison]:
    modules, left_out = load(PEERS)

    def block(tick: Tick) -> Samples:
        model = make_model()
        updates = {FLOOR: foreach_lerp(model)} | trainbus.ema(model, MOMENTUM)
        for module in modules.values():
            updates |= module.ema(model, MOMENTUM)
        contenders = {name: timed(update) for name, update in updates.items()}
        return measure(contenders, settings.rounds(quick=5, full=25), tick)

    with one_thread():
        samples = in_blocks(settings, 6, block)
    parameters = sum(parameter.numel() for parameter in make_model().parameters())
    title = f"One update, {parameters / 1e6:.0f} M parameters in {2 * LAYERS} tensors"
    return [Comparison(title, "ms", FLOOR, samples, budget=Budget(7, 1.05), left_out=left_out)]


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def foreach_lerp(model: nn.Module) -> Update:
    weights = [parameter.detach() for parameter in model.parameters()]
    average = [weight.clone() for weight in weights]
    return lambda: torch._foreach_lerp_(average, weights, MOMENTUM)


def timed(update: Update) -> Sample:
    def sample() -> float:
        update()  # the contender before left its own average in the caches
        start = time.perf_counter()
        for _ in range(UPDATES_PER_SAMPLE):
            update()
        return (time.perf_counter() - start) / UPDATES_PER_SAMPLE

    return sample
