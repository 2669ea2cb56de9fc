"""``trainbus demo``."""

from __future__ import annotations

from pathlib import Path

from eventloop.cli.common import Positive, Seed
from eventloop.cli.run import free, resumable, to_resume

DEFAULT = Path("runs/digits")


def demo(*, out: Path | None = None, epochs: Positive = 30, seed: Seed = 0, resume: bool = False) -> int:
    """Train a small network on handwritten digits, with many hooks.

    Args:
        out: folder of the files; by default a new one: runs/digits, runs/digits-2 …
        epochs: total number of epochs.
        seed: seed of weights, shuffling and split.
        resume: resume from the last checkpoint in --out, or in the newest run.
    """
    from hooks.demo import run_demo

    work_dir = to_resume(out, DEFAULT) if resume else free(out or DEFAULT)
    with resumable(work_dir, f"--resume --out {work_dir}"):
        return run_demo(work_dir, epochs=epochs, seed=seed, resume=resume)
