"""The size of a packed tree (see `tree`), found out before it is unpacked: a byte of it may become an object of many."""

from __future__ import annotations

from typing import Final

from eventloop.checkpoint.rebuild import UNPACKED
from eventloop.checkpoint.tree import MAX_VALUES

_TOKENS: Final = 8 * MAX_VALUES
"""A value takes up to so many: a numpy array is an extension around a list of three, the second of which is a list."""

_SMALL: Final = 4 << 20
"""Bytes that are not worth counting: 100,000 tensors have as many, and they become 400 MB at most."""


def _steps() -> list[int]:
    """For each first byte of a token how many bytes it has in all; 0 where that depends on those that follow."""
    steps = [1] * 256  # nil, booleans, small integers; and the beginnings of maps and lists, whose parts follow
    for code in range(0xA0, 0xC0):
        steps[code] = 1 + (code & 31)  # short texts
    fixed = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    fixed |= {0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}
    for code, step in fixed.items():
        steps[code] = step
    for code in (*_LENGTHS, *_EXTENSIONS):
        steps[code] = 0
    return steps


_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes and texts: how many bytes their length has."""

_EXTENSIONS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0}
"""The same of extensions; those of a fixed length have none."""

_STEPS: Final = _steps()


def check_packed(packed: memoryview) -> None:
    """Refuse a tree of more values than any that was written.

    Raises:
        ValueError: it has more.
    """
    if len(packed) <= _SMALL:
        return
    at, end, tokens = 0, len(packed), 0
    while at < end:
        tokens += 1
        if tokens > _TOKENS:
            raise ValueError(f"more than {_TOKENS:,} values")
        code = packed[at]
        step = _STEPS[code]
        if step:
            at += step
        elif code in _LENGTHS:
            start = at + 1 + _LENGTHS[code]
            at = start + int.from_bytes(packed[at + 1 : start], "big")
        else:
            at = _after(packed, at, code)


def _after(packed: memoryview, at: int, code: int) -> int:
    """Return where the next token begins after the beginning of an extension: within it, if it is unpacked as well."""
    start = at + 1 + _EXTENSIONS[code]
    length = int.from_bytes(packed[at + 1 : start], "big") if _EXTENSIONS[code] else 1 << (code - 0xD4)
    unpacked = start < len(packed) and packed[start] in UNPACKED
    return start + 1 + (0 if unpacked else length)
