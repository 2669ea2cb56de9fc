"""What a writer is: where scalars go. The logger calls it from its own thread only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from eventloop import check_options
from eventloop.config import registrable
from hooks.options import PositiveInt

Image = np.ndarray[Any, np.dtype[np.uint8]]


class RunFacts(msgspec.Struct, frozen=True):
    """Who runs: the same for everything that a writer gets until it is closed."""

    name: str
    work_dir: Path | None = None
    seed: int | None = None
    config: dict[str, Any] = {}


class Where(msgspec.Struct, frozen=True):
    """Where in a run scalars come from. All counts begin at 1 and include the present one; a validation after the third
    epoch has ``epoch=3``, before any training 0.

    ``stage`` is ``"train"``, ``"val"``, ``"test"``, or ``"eval"`` for what an ``EvaluateHook`` has found. ``batch`` counts
    within the epoch, ``epoch_length`` are the batches of one, where known.
    """  # noqa: D205 - one sentence too long for a line

    stage: str
    epoch: int
    iter: int
    batch: int = 0
    epoch_length: int | None = None
    max_epochs: int | None = None
    max_iters: int | None = None


@registrable("writer")
class Writer:
    """Base of all writers: override what the target can take. Everything else is let go.

    The least is :meth:`write_scalar`, or :meth:`write_scalars` where many at once are cheaper. Called by one thread at a time,
    never by the training thread, so it may block. What it raises is logged, and it is tried again, with pauses that grow to a
    minute: see :class:`hooks.writers.target.Target`. If it fails twice in a row it is closed and opened again, and gets
    what came since its last :meth:`flush` that worked. Up to 10,000 calls wait; what is lost is counted and told.

    Args:
        interval: iterations between training scalars; None takes the logger's. With 1 it gets every iteration's values as
            they are, with more their means (see ``LoggerHook``).

    Raises:
        ConfigurationError: an interval that is not positive.
    """

    interval: int | None = None

    @check_options
    def __init__(self, interval: PositiveInt | None = None) -> None:
        self.interval = interval

    def open(self, run: RunFacts) -> None:
        """Get ready for a run; called before anything else, and again for the next run after :meth:`close`."""

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        """Take scalars of one moment.

        Args:
            scalars: by name with its stage, such as ``train/loss``; may be NaN or infinite.
            step: what to put on the x axis: iterations in training, epochs (or iterations) in validation.
            where: the moment in full.
        """
        for name, value in scalars.items():
            self.write_scalar(name, value, step)

    def write_scalar(self, name: str, value: float, step: int) -> None:
        """Take one scalar; by default it goes the way of :meth:`write_scalars`, so a writer needs only one of the two."""
        if type(self).write_scalars is Writer.write_scalars:
            raise NotImplementedError(f"{type(self).__name__} must define write_scalars or write_scalar")
        self.write_scalars({name: value}, step, Where(name.partition("/")[0], epoch=0, iter=step))

    def write_image(self, name: str, image: Image, step: int) -> None:
        """Take an image that was reported with ``run.report_image``.

        Args:
            name: with its stage, such as ``val/samples``.
            image: height × width × channels; channels are 1 (grey), 3 (RGB) or 4 (RGBA).
            step: as for scalars.
        """

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Take the user's configuration of the run: mappings, lists, numbers, strings and None in any nesting."""

    def write_text(self, name: str, text: str, where: Where) -> None:
        """Take a line of text, such as the experiment's name."""

    def flush(self) -> None:
        """Make what was written visible; called whenever the logger has nothing more to write for the moment."""

    def sync(self) -> None:
        """Make what was written durable; called before a checkpoint of these iterations is committed. Flushes by default."""
        self.flush()

    def aborted(self) -> None:
        """Take the news that an exception has ended the run; :meth:`close` follows."""

    def close(self) -> None:
        """Let go of files and connections; the run is over."""
