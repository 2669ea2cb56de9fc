"""Images as writers get them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hooks.writers.base import Image

_CHANNELS = (1, 3, 4)


def as_image(value: Any) -> Image:
    """Return an image of height × width × channels, in bytes.

    Args:
        value: a tensor or array of height × width, channels × height × width or height × width × channels, with 1, 3 or 4
            channels; where both could be meant, channels come first. Bytes, or booleans and floats from 0 to 1; floats
            beyond are cut off, and NaN is black.
    """
    pixels = value.float().numpy() if isinstance(value, torch.Tensor) and value.is_floating_point() else np.asarray(value)
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    elif pixels.shape[0] in _CHANNELS:
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.dtype == np.bool_:
        pixels = pixels * np.uint8(255)
    elif pixels.dtype != np.uint8:
        pixels = np.rint(np.nan_to_num(pixels, nan=0.0).clip(0.0, 1.0) * 255)
    return np.ascontiguousarray(pixels, dtype=np.uint8)
