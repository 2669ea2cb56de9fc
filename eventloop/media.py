"""What ``run.report`` takes beside numbers: images, histograms, texts and figures, which are published for writers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, final

import msgspec
import numpy as np
import torch

from trainbus.eventloop.events import HistogramReported, ImageReported, RunEvent, RunView, TextReported

__all__ = ["Figure", "Histogram", "Image", "Text"]

Pixels = np.ndarray[Any, Any]

MOST_TEXT: Final = 65_536  # characters of a text; the rest is cut off
_MOST_BINS: Final = 512  # some services take no more


class Media(msgspec.Struct, frozen=True, eq=False):
    """A value of ``run.report`` that is published as an event of its own, if a writer takes such events."""

    event: ClassVar[type[RunEvent]]

    def payload(self, name: str) -> dict[str, Any]:
        """Return the fields of the event; raise TypeError or ValueError if the value does not fit."""
        raise NotImplementedError


@final
class Image(Media, frozen=True, eq=False):
    """An image: ``run.report(samples=Image(array))``. Offloaded handlers get a copy.

    Args:
        image: height × width, channels × height × width or height × width × channels (if ambiguous, channels first);
            1, 3 or 4 channels; uint8, or booleans and floats from 0 to 1. Anything else is a ValueError.
    """

    event = ImageReported
    image: torch.Tensor | Pixels

    def payload(self, name: str) -> dict[str, Any]:  # noqa: D102 - of Media
        check_image(name, self.image)
        return {"image": self.image}


@final
class Histogram(Media, frozen=True, eq=False):
    """The distribution of values: ``run.report(weights=Histogram(tensor))``.

    The training thread only copies the values; the logger's thread counts them. NaN and infinite values are left out, and
    their number is logged.

    Args:
        values: real numbers in any shape, on any device. An object that is no tensor or numpy array is a TypeError; empty,
            complex, sparse or distributed values are a ValueError.
        bins: number of bins of equal width from the least to the greatest value, at most 512.
    """

    event = HistogramReported
    values: torch.Tensor | Pixels
    bins: int = 64

    def payload(self, name: str) -> dict[str, Any]:  # noqa: D102 - of Media
        check_values(name, self.values, self.bins)
        return {"values": self.values, "bins": self.bins}


@final
class Text(Media, frozen=True, eq=False):
    """A text: ``run.report(answer=Text("…"))``. Only its first 65,536 characters are kept.

    Args:
        text: plain text; some writers read it as Markdown. An object that is no ``str`` is a TypeError.
    """

    event = TextReported
    text: str

    def payload(self, name: str) -> dict[str, Any]:  # noqa: D102 - of Media
        return {"text": checked_text(name, self.text)}


@final
class Figure(Media, frozen=True, eq=False):
    """A figure, drawn as an image if a writer takes images: ``run.report(curve=Figure(figure))``.

    The calling thread draws, because plots are not thread-safe: 50 to 200 ms for one pair of axes, more for several. The
    figure stays open and unchanged; closing it frees its memory.

    Args:
        figure: a figure of a library that :mod:`trainbus.bridges` draws, or an object with one, such as axes. Anything else is
            a TypeError.
    """

    event = ImageReported
    figure: Any

    def payload(self, name: str) -> dict[str, Any]:  # noqa: D102 - of Media
        return {"image": drawn(name, self.figure)}


MEDIA: Final[frozenset[type]] = frozenset({Image, Histogram, Text, Figure})


def without_media(run: RunView, entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Publish the images, histograms, texts and figures among ``entries``; return the others."""
    for value in entries.values():  # each iteration comes here: a loop takes less time than any()
        if value.__class__ in MEDIA:
            break
    else:
        return entries
    others = {}
    for name, value in entries.items():
        if not isinstance(value, Media):
            others[name] = value
        elif run.bus.wants(value.event):
            run.publish(value.event, name=name, **value.payload(name))
    return others


def check_image(name: str, image: Any) -> None:
    """Raise ValueError unless the shape and type fit :class:`Image`."""
    if not isinstance(image, torch.Tensor | np.ndarray):
        raise TypeError(f"image {name!r}: give a tensor or a numpy array, such as numpy.asarray(picture), not {image!r}")
    shape = tuple(image.shape)
    flat = len(shape) == 2
    if 0 in shape or not (flat or (len(shape) == 3 and (shape[0] in (1, 3, 4) or shape[-1] in (1, 3, 4)))):
        raise ValueError(
            f"image {name!r} has the shape {shape}: give (height, width), (channels, height, width) or (height, width, "
            "channels), with 1, 3 or 4 channels. For a batch, report one image or a grid (torchvision.utils.make_grid)"
        )
    if isinstance(image, torch.Tensor):
        fits = image.is_floating_point() or image.dtype in (torch.uint8, torch.bool)
    else:
        fits = image.dtype.kind in "fb" or image.dtype == np.uint8
    if not fits:
        raise ValueError(f"image {name!r} has the dtype {image.dtype}: give uint8, bool, or floats from 0 to 1")


def check_values(name: str, values: Any, bins: int) -> None:
    """Raise TypeError or ValueError unless the values fit :class:`Histogram`."""
    if not isinstance(values, torch.Tensor | np.ndarray):
        raise TypeError(f"histogram {name!r}: give a tensor or a numpy array, such as numpy.asarray(values), not {values!r}")
    if not (isinstance(bins, int) and 1 <= bins <= _MOST_BINS):
        raise ValueError(f"histogram {name!r}: bins={bins!r}: give a number from 1 to {_MOST_BINS}")
    if trouble := _trouble(values):
        raise ValueError(f"histogram {name!r}: {trouble}")


def _trouble(values: torch.Tensor | np.ndarray[Any, Any]) -> str:
    """Return what keeps values from being counted, and the way out; "" if nothing does."""
    if 0 in values.shape:
        return f"no values (shape {tuple(values.shape)}): report it where there are some"
    if isinstance(values, np.ndarray):
        return "" if values.dtype.kind in "biuf" else f"the dtype is {values.dtype}: give real numbers"
    if values.is_complex() or values.is_quantized:
        way_out = "abs" if values.is_complex() else "dequantize"
        return f"the dtype is {values.dtype}: give real numbers, such as values.{way_out}()"
    if hasattr(values, "to_local"):
        return "the tensor is distributed: give values.to_local(), this rank's part, or values.full_tensor() on all ranks"
    if values.layout is not torch.strided:
        return f"the layout is {values.layout}: give values.to_dense() or values.values()"
    return "the tensor is on the meta device and has no values" if values.is_meta else ""


def checked_text(name: str, text: Any) -> str:
    """Return the first ``MOST_TEXT`` characters of a text, and how many are left out; raise TypeError for another object."""
    if not isinstance(text, str):
        raise TypeError(f"text {name!r}: give a str, such as str(value), not {text!r}")
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}… ({len(text) - MOST_TEXT:,} more characters)"


_figures: dict[str, Callable[[Any], Pixels | None]] = {}


def register_figures(library: str, draw: Callable[[Any], Pixels | None]) -> None:
    """Register what draws the figures of a library: it returns pixels (height × width × RGBA), or None for another object."""
    _figures[library] = draw


def drawn(name: str, figure: Any) -> Pixels:
    """Return the pixels of a figure, height × width × RGBA; raise TypeError for an object that nothing here can draw."""
    found = next((pixels for draw in _figures.values() if (pixels := draw(figure)) is not None), None)
    if found is None:
        raise TypeError(
            f"figure {name!r}: give a figure of {' or '.join(_figures)}, or its axes, not {figure!r}; report the picture of "
            f"another library with run.report({name}=Image(array))"
        )
    return found
