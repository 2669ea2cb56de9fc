"""Encode images as PNG, without a library for images."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from trainbus.hooks.writers.base import Image

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"

_COLOURS: Final = {1: 0, 3: 2, 4: 6}  # grey, RGB, RGBA: https://www.w3.org/TR/png-3/#11IHDR


def png(image: Image) -> bytes:
    """Return an image of height × width × channels (1, 3 or 4) as a PNG file."""
    height, width, channels = image.shape
    rows = np.empty((height, 1 + width * channels), np.uint8)
    rows[:, 0] = 1  # the filter "Sub" (https://www.w3.org/TR/png-3/#9Filters): differences from the pixel to the left
    pixels = rows[:, 1:].reshape(height, width, channels)
    pixels[:] = image
    pixels[:, 1:] -= image[:, :-1]
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))
