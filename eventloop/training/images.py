"""What can be reported as an image."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_CHANNELS = (1, 3, 4)


def check_image(name: str, image: Any) -> None:
    """Raise ValueError unless ``image`` is one: see ``Run.report_image``."""
    if not isinstance(image, torch.Tensor | np.ndarray):
        raise TypeError(f"image {name!r}: give a tensor or a numpy array, such as numpy.asarray(picture), not {image!r}")
    shape = tuple(image.shape)
    flat = len(shape) == 2
    if 0 in shape or not (flat or (len(shape) == 3 and (shape[0] in _CHANNELS or shape[-1] in _CHANNELS))):
        raise ValueError(
            f"image {name!r} has the shape {shape}: give (height, width), (channels, height, width) or (height, width, "
            "channels), with 1, 3 or 4 channels. Of a batch, report one, or a grid (torchvision.utils.make_grid)"
        )
    if isinstance(image, torch.Tensor):
        fits = image.is_floating_point() or image.dtype in (torch.uint8, torch.bool)
    else:
        fits = image.dtype.kind in "fb" or image.dtype == np.uint8
    if not fits:
        raise ValueError(f"image {name!r} is of {image.dtype}: give bytes (uint8), or booleans or floats from 0 to 1")
