"""Checks of what ``run.report_image``, ``report_histogram``, ``report_text`` and ``report_figure`` get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

Pixels = np.ndarray[Any, Any]

MOST_TEXT: Final = 65_536  # characters of a text; the rest is cut off
_MOST_BINS: Final = 512  # some services take no more


def check_image(name: str, image: Any) -> None:
    """Raise ValueError unless the shape and type fit ``Run.report_image``."""
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
    """Raise TypeError or ValueError unless the values fit ``Run.report_histogram``."""
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
            "another library with run.report_image(name, array)"
        )
    return found
