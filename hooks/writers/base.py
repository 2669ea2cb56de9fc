"""What a writer is: the end of the way of scalars and images. The logger calls it from its own thread only."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

from eventloop import ConfigurationError, check_options
from eventloop.config import registrable
from hooks.options import PositiveInt

Image = np.ndarray[Any, np.dtype[np.uint8]]


class RunFacts(msgspec.Struct, frozen=True):
    """The run that a writer writes for, the same from its ``open`` to its ``close``."""

    name: str
    work_dir: Path | None = None
    seed: int | None = None
    config: dict[str, Any] = {}


class Where(msgspec.Struct, frozen=True):
    """The moment in a run that scalars are of.

    Counts begin at 1 and include the present one: a validation after the third epoch has ``epoch=3``, one before any
    training ``epoch=0``. ``stage`` is ``"train"``, ``"val"``, ``"test"``, or ``"eval"`` for results of an ``EvaluateHook``.
    ``batch`` counts within the epoch. ``epoch_length`` is in batches, None where it is not known.
    """

    stage: str
    epoch: int
    iter: int
    batch: int = 0
    epoch_length: int | None = None
    max_epochs: int | None = None
    max_iters: int | None = None


@registrable("writer")
class Writer:
    """Base of all writers. Override :meth:`write_scalar` or :meth:`write_scalars`, and methods for other data.

    One thread at a time calls a writer, never the training thread, so it may block. An exception is logged, and the call is
    repeated after pauses that grow to a minute. After two failures in a row the writer is closed and opened again, and gets
    everything since its last :meth:`flush` that worked. Up to 10,000 calls wait; lost ones are counted and logged.

    Args:
        interval: iterations between training scalars; None takes the logger's. With 1 the writer gets the values of every
            iteration as they are, with more their means (see ``LoggerHook``).

    Raises:
        ConfigurationError: the interval is not positive.
    """

    interval: int | None = None

    @check_options
    def __init__(self, interval: PositiveInt | None = None) -> None:
        self.interval = interval

    def open(self, run: RunFacts) -> None:
        """Get ready for a run; called before anything else, and for the next run after :meth:`close`."""

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        """Take scalars of one moment.

        Args:
            scalars: by name with its stage, such as ``train/loss``; may be NaN or infinite.
            step: the value on the x axis: iterations in training, epochs (or iterations) in validation.
            where: the moment in full.
        """
        for name, value in scalars.items():
            self.write_scalar(name, value, step)

    def write_scalar(self, name: str, value: float, step: int) -> None:
        """Take one scalar. The default calls :meth:`write_scalars`, so a writer defines one of the two."""
        if type(self).write_scalars is Writer.write_scalars:
            raise NotImplementedError(f"{type(self).__name__} must define write_scalars or write_scalar")
        self.write_scalars({name: value}, step, Where(name.partition("/")[0], epoch=0, iter=step))

    def write_image(self, name: str, image: Image, step: int) -> None:
        """Take an image that was reported with ``run.report_image``.

        Args:
            name: with its stage, such as ``val/samples``.
            image: height × width × channels; 1 channel is grey, 3 are RGB, 4 RGBA.
            step: as for scalars.
        """

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Take the run's configuration: mappings, lists, numbers, strings and None in any nesting."""

    def write_text(self, name: str, text: str, where: Where) -> None:
        """Take a line of text, such as the experiment's name."""

    def flush(self) -> None:
        """Make written data visible; called when the logger has nothing more to write for the moment."""

    def sync(self) -> None:
        """Make written data durable; called before a checkpoint of these iterations is committed. Flushes by default."""
        self.flush()

    def aborted(self) -> None:
        """Note that an exception has ended the run; :meth:`close` follows."""

    def close(self) -> None:
        """Release files and connections; the run is over."""


def as_image(value: Any) -> Image:
    """Return an image of height × width × channels, in bytes.

    Args:
        value: a tensor or array of height × width, channels × height × width or height × width × channels, with 1, 3 or 4
            channels; where both are possible, channels come first. Bytes, booleans, or floats from 0 to 1. Floats outside
            are clipped, NaN becomes black.
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
        raise ConfigurationError(f'{writer} needs {package} ({error}): pip install "trainbus[{extra}]"') from error
