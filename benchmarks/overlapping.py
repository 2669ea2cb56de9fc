"""Measure how much longer a step takes after a save whose copy overlaps the forward and backward pass.

The step trains the saved model itself, on one thread: forward, backward, and the optimizer's step, which waits for the copy.
The floor copies first and then takes the step. The copy alone is compared with it. If the file is written as well, a thread
does so after the copy, beside this step and the next ones.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import SUBJECT, Budget, Comparison, Sample, Settings, Tick, measure
from benchmarks.saving import FOREACH, Size, remove
from trainbus.eventloop.checkpoint import AsyncSaver, Overlap, StageBuffer, load, stage

STEP_ALONE = "step alone"
BLOCK, WRITTEN = f"{SUBJECT}, block", f"{SUBJECT}, and written"
AT_LEAST = 0.2  # seconds of forward and backward
LIMIT, LIMIT_OF_SMALL = 0.15, 0.4
SIDE = 1000
"""Vectors have so many elements, matrices so many rows and columns."""
LEARNING_RATE = 1e-7  # moves every weight, and leaves all of them near enough to where they are

_numbers = count(1)


def steps(settings: Settings, size: Size, directory: Path, tick: Tick) -> Comparison:
    """Measure the time that the copy adds to the step after it, against the copy alone."""
    training, small = Training(size), size.elements == SIDE
    with ExitStack() as scopes:
        overlap = scopes.enter_context(closing(Overlap([training.optimizer])))
        written = Written(training, scopes.enter_context(closing(AsyncSaver(overlap=[training.optimizer]))), directory)
        saves = {
            STEP_ALONE: lambda: None,
            FOREACH: foreach_copy(training),
            SUBJECT: staging(training, overlap),
            BLOCK: staging(training, None),
        }
        contenders = {name: training.step_after(save) for name, save in saves.items()} | {WRITTEN: written}
        # The copy of small tensors is a few hundredths of their step, so it takes more rounds to see it.
        samples = measure(contenders, settings.rounds(quick=1, full=61 if small else 7), tick)
    title = f"Added to a step of {training.seconds * 1e3:,.0f} ms by the copy: {size}"
    return Comparison(title, "ms", FOREACH, samples, STEP_ALONE, Budget(6, LIMIT_OF_SMALL if small else LIMIT))


class Training:
    """A model with the tensors that are saved, and its steps on batches of such a size that they take long enough."""

    def __init__(self, size: Size) -> None:
        matrices = size.elements == SIDE * SIDE
        self.model = nn.ParameterList([torch.eye(SIDE) if matrices else torch.ones(SIDE) for _ in range(size.tensors)])
        self.apply = torch.matmul if matrices else torch.mul
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.weights = [parameter.detach() for parameter in self.model.parameters()]
        self.rows = 1
        self.passes()  # gradients get their memory
        while (seconds := self.passes()) < AT_LEAST:
            self.rows *= 2
        self.seconds = seconds

    def passes(self) -> float:
        """Forward and backward; seconds."""
        self.optimizer.zero_grad(set_to_none=False)
        start = time.perf_counter()
        out = torch.ones(self.rows, SIDE)
        for weight in self.model:
            out = self.apply(out, weight)
        out.sum().backward()
        return time.perf_counter() - start

    def step_after(self, save: Callable[[], object]) -> Sample:
        def sample() -> float:
            self.optimizer.zero_grad(set_to_none=False)
            start = time.perf_counter()
            save()
            saved = time.perf_counter() - start
            passes = self.passes()
            start = time.perf_counter()
            self.optimizer.step()
            return saved + passes + time.perf_counter() - start

        return sample


class Written:
    """Take steps after saves that are written; each file must hold the weights from before the step."""

    def __init__(self, training: Training, saver: AsyncSaver, directory: Path) -> None:
        self.training = training
        self.saver = saver
        self.path = directory / f"overlapping_{next(_numbers)}"
        self.step = training.step_after(lambda: saver.save({"model": list(training.model)}, self.path))
        self.checked = False

    def __call__(self) -> float:
        before = None if self.checked else [weight.clone() for weight in self.training.weights]
        seconds = self.step()
        self.saver.wait()
        if before is not None:
            self.check(before)
        remove(self.path)
        return seconds

    def check(self, before: list[torch.Tensor]) -> None:
        saved = load(self.path)["model"]
        if not all(map(torch.equal, saved, before)) or any(map(torch.equal, saved, self.training.weights)):
            raise RuntimeError("the file does not hold the weights at the moment of the save")
        self.checked = True


def foreach_copy(training: Training) -> Callable[[], object]:
    flat = torch.zeros(sum(weight.numel() for weight in training.weights))
    parts = flat.split([weight.numel() for weight in training.weights])
    views = [part.view_as(weight) for part, weight in zip(parts, training.weights, strict=True)]
    return lambda: torch._foreach_copy_(views, training.weights)


def staging(training: Training, overlap: Overlap | None) -> Callable[[], object]:
    tree, buffer = {"model": list(training.model)}, StageBuffer()
    return lambda: stage(tree, buffer, overlap=overlap).release()
