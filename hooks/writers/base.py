"""The base class of writers. The logger calls a writer from the logger's thread only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import msgspec
import numpy as np
import torch

from trainbus.eventloop import ConfigurationError, check_options
from trainbus.eventloop.errors import cannot_import
from trainbus.eventloop.events import Progress
from trainbus.eventloop.registry import registrable
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.options import PositiveInt
from trainbus.hooks.writers.histogram import BinCounts

Image = np.ndarray[Any, np.dtype[np.uint8]]


class RunFacts(msgspec.Struct, frozen=True):
    """The facts of a run, which stay the same from a writer's ``open`` to its ``close``."""

    name: str
    work_dir: Path | None = None
    seed: int | None = None
    config: dict[str, Any] = {}

    @property
    def folder(self) -> Path:
        """The work dir, for writers with ``needs_work_dir``.

        Raises:
            ConfigurationError: the run has no work dir.
        """
        if self.work_dir is None:
            raise ConfigurationError("the run has no work dir; give it work_dir=")
        return self.work_dir


class Where(msgspec.Struct, frozen=True):
    """The position in a run at which scalars were reported.

    Counts begin at 1 and include the present iteration or epoch: a validation after the third epoch has ``epoch=3``, one before
    any training ``epoch=0``. ``stage`` is ``"train"``, ``"val"``, ``"test"``, or ``"eval"`` for results of an ``EvaluateHook``.
    ``batch`` counts within the epoch. ``epoch_length`` is in batches, or None if it is unknown. ``update`` counts the updates
    before a training iteration.
    """

    stage: str
    epoch: int
    iter: int
    batch: int = 0
    epoch_length: int | None = None
    max_epochs: int | None = None
    max_iters: int | None = None
    update: int = 0

    @classmethod
    def of(cls, progress: Progress, batch: int = 0, epoch_length: int | None = None) -> Self:
        """Return the position that an event with this ``progress`` tells of."""
        now = progress.stage == "train"  # progress does not count the present iteration yet
        epoch, iteration = progress.epoch + now, progress.iter + now
        limits = progress.max_epochs, progress.max_iters
        return cls(progress.stage, epoch, iteration, batch, epoch_length, *limits, progress.update)


Row = tuple[Mapping[str, float], int, Where]
"""The arguments of a :meth:`Writer.write_scalars`."""


@registrable("writer")
class Writer(CopiedAnew):
    """Base class of all writers. Override :meth:`write_scalar` or :meth:`write_scalars`, and methods for other data.

    A writer may block, because one thread at a time calls it, and never the training thread. The logger logs an exception and
    repeats the call after pauses that grow to a minute. After two failures in a row it closes and reopens the writer, and
    repeats everything since the last successful :meth:`flush`. Up to 10,000 calls wait; lost calls are counted and logged.

    Args:
        interval: iterations between training scalars; None uses the logger's. With 1 the writer gets the raw values of every
            iteration, with more their means (see ``LoggerHook``).

    Raises:
        ConfigurationError: an option is invalid. All writers check their options.
    """

    interval: int | None = None
    needs_work_dir: bool = False
    """True: the logger does not call this writer in a run without a work dir."""

    @check_options
    def __init__(self, interval: PositiveInt | None = None) -> None:
        self.interval = interval

    def files(self) -> Collection[str]:
        """Return the names of the files and folders in the work dir that belong to one run; none by default."""
        return ()

    def in_check(self) -> Writer | None:
        """Return the writer for ``loop.check()``; called on a copy. None leaves it out: override it if you write elsewhere."""
        return self

    def open(self, run: RunFacts) -> None:
        """Begin a run; called before all other methods, and again for the next run after :meth:`close`."""

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        """Write scalars that belong together.

        Args:
            scalars: values by name, with the stage, such as ``train/loss``; a value may be NaN or infinite.
            step: value on the x axis: iterations in training, epochs (or iterations) in validation.
            where: the full position in the run.
        """
        for name, value in scalars.items():
            self.write_scalar(name, value, step)

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Write the scalars of successive training iterations, in order. By default :meth:`write_scalars` writes each.

        Define it besides :meth:`write_scalars` where many rows at once cost less. The logger uses it for writers of every
        iteration. If it raises, the rows come again, one by one: it had better write none of them before an error.
        """
        for row in rows:
            self.write_scalars(*row)

    def write_scalar(self, name: str, value: float, step: int) -> None:
        """Write one scalar. The default calls :meth:`write_scalars`, so a writer defines one of the two.

        Raises:
            NotImplementedError: the class defines neither.
        """
        if type(self).write_scalars is Writer.write_scalars:
            raise NotImplementedError(f"{type(self).__name__} must define write_scalars or write_scalar")
        self.write_scalars({name: value}, step, Where(name.partition("/")[0], epoch=0, iter=step))

    def write_reported(self, name: str, value: Image | BinCounts | str, step: int, where: Where) -> None:
        """Write an image, a histogram or a text that was reported. By default the method for its type does.

        Define the methods for the types that the writer takes, or this one, which gets the step and the position.
        """
        if isinstance(value, str):
            self.write_text(name, value, where)
        elif isinstance(value, BinCounts):
            self.write_histogram(name, value, step)
        else:
            self.write_image(name, value, step)

    def write_image(self, name: str, image: Image, step: int) -> None:
        """Write an image that was reported (:class:`trainbus.media.Image`).

        Args:
            name: name with the stage, such as ``val/samples``.
            image: height × width × channels; 1 channel is grey, 3 are RGB, 4 are RGBA.
            step: as for scalars.
        """

    def write_histogram(self, name: str, histogram: BinCounts, step: int) -> None:
        """Write a histogram of values that were reported (:class:`trainbus.media.Histogram`).

        Args:
            name: name with the stage, such as ``train/weights``.
            histogram: the counts of its bins, and what was left out.
            step: as for scalars.
        """

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the run's configuration: nested mappings, lists, numbers, strings and None."""

    def write_text(self, name: str, text: str, where: Where) -> None:
        """Write a text that was reported (:class:`trainbus.media.Text`), or the experiment's name.

        Args:
            name: name with the stage, such as ``val/samples``; ``experiment`` for the experiment's name.
            text: plain text, perhaps of several lines.
            where: the position in the run.
        """

    def flush(self) -> None:
        """Make written data visible; called when the logger has written all waiting events."""

    def sync(self) -> None:
        """Make written data durable; called before a checkpoint of these iterations is committed. Flushes by default."""
        self.flush()

    def aborted(self) -> None:
        """Handle the end of a run by an exception; :meth:`close` follows."""

    def close(self) -> None:
        """Release files and connections at the end of the run."""


def as_image(value: Any) -> Image:
    """Return an image of height × width × channels, in uint8.

    Args:
        value: a tensor or array of height × width, channels × height × width or height × width × channels, with 1, 3 or 4
            channels. If the shape is ambiguous, channels come first. Values are uint8, bool, or floats from 0 to 1; floats
            outside are clipped, and NaN becomes black.
    """
    pixels = value.float().numpy() if isinstance(value, torch.Tensor) and value.is_floating_point() else np.asarray(value)
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    elif pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.dtype == np.bool_:
        pixels = pixels * np.uint8(255)
    elif pixels.dtype != np.uint8:
        pixels = np.rint(np.nan_to_num(pixels, nan=0.0).clip(0.0, 1.0) * 255)
    return np.ascontiguousarray(pixels, dtype=np.uint8)


def load(writer: str, package: str, *modules: str) -> list[ModuleType]:
    """Import the modules of an optional package that a writer needs.

    Raises:
        ConfigurationError: a module is missing; the message names the extra to install.
    """
    try:
        return [import_module(module) for module in modules]
    except ImportError as error:
        extra = package.lower()
        raise cannot_import(writer, package, extra, error, extra, *modules) from error
