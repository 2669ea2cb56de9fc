"""A training program as a tree of lines, and as the source of a script that a person can read and run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .kit import Strike

HEADER = '''\
"""A training program that tests/loops wrote. In the root of the project: python FILE"""
import random
from itertools import islice

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.loops.kit import Augmented, Kept, Said, Strike, Strikes, left


def train(bus_of, strike, folder):
    tb = bus_of  # trainbus, or tests.loops.plain
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
'''

FOOTER = """

if __name__ == "__main__":
    from tests.loops.trials import main

    main(train, {strikes}, again={again})
"""


@dataclass(frozen=True)
class Line:
    """A line of a program, or a block: a line that ends in a colon, with its lines.

    ``feature`` is the part of the grammar that wrote it. ``{n}`` in its text is its own number.
    """

    text: str
    feature: str = ""
    body: tuple[Line, ...] = ()

    def lines(self, indent: int) -> Iterator[tuple[int, Line]]:
        yield indent, self
        for line in self.body:
            yield from line.lines(indent + 1)

    def walk(self) -> Iterator[Line]:
        yield self
        for line in self.body:
            yield from line.walk()


@dataclass(frozen=True)
class Program:
    """A program: lines that make its parts, and the lines in ``with tb.Run(...)``; and what strikes it."""

    setup: tuple[Line, ...]
    run: tuple[Line, ...]
    strikes: tuple[Strike, ...] = ()
    parts: tuple[str, ...] = ()
    """What the run has: models, optimizers and stateful objects, by their names in the program."""
    again: bool = False
    """Whether the finished program is started once more."""

    def walk(self) -> Iterator[Line]:
        for line in (*self.setup, *self.run):
            yield from line.walk()

    @property
    def features(self) -> set[str]:
        """The parts of the grammar that the program uses."""
        kinds = {f"strike {one.kind}" for one in self.strikes}
        return {line.feature for line in self.walk() if line.feature} | kinds

    def function(self) -> str:
        """Return the source of ``train``, with the imports that it needs."""
        out = [HEADER]
        inside = [(1, line) for line in self.setup]
        inside += [pair for line in self.run for pair in line.lines(1)]
        for number, (indent, line) in enumerate(inside, start=1):
            out.append(f"{'    ' * indent}{line.text.replace('{n}', str(number))}\n")
        parts = "".join(f", {name}={name}" for name in self.parts)
        out.append(f"    return left(run, say{parts})\n")
        return "".join(out)

    def source(self) -> str:
        """Return the script."""
        return self.function() + FOOTER.format(strikes=repr([tuple(one) for one in self.strikes]), again=self.again)

    def __repr__(self) -> str:
        return f"\n{self.source()}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print the tree
