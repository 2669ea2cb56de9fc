"""The contents of a checkpoint as lines and as JSON, for ``trainbus checkpoint show``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from rich.filesize import decimal

from trainbus.eventloop.checkpoint.unpack import ObjectParts, join
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.spelling import nearest
from trainbus.eventloop.terminal import printable

DEPTH: Final = 2
_LONG: Final = 4096  # bits from which a JSON reader may refuse an integer
_SHORT: Final = 60  # characters of a container that is shown in one line


def find(tree: Any, key: str) -> tuple[str, Any]:
    """Return the part of a tree at a dotted path, with the path of its container.

    Keys may contain dots. A common prefix of several keys (``state_dict.head``) finds all of them.
    """
    part, rest, done = tree, key, ""
    while rest:
        children = dict(_children(part))
        # The longest key first, because a.b has two meanings in {"a": {"b": 1}, "a.b": 2}.
        name = next((each for each in sorted(children, key=len, reverse=True) if f"{rest}.".startswith(f"{each}.")), None)
        if name is None:
            if group := {each: value for each, value in children.items() if f"{each}.".startswith(f"{rest}.")}:
                return done, group
            where = f"under {done!r}" if done else "in the checkpoint"
            near = nearest(rest, children, most=5, cutoff=0.5) or list(children)[:8]
            there = ", ".join(map(printable, near)) + (" …" if len(near) < len(children) else "")
            found = f"; found there: {there}" if children else ", which is a single value"
            raise CheckpointError(f"{rest!r} is not {where}{found}")
        part, rest, done = children[name], rest[len(name) + 1 :], join(done, name)
    return done, part


class Outline:
    """Format a tree as lines of text, at most ``most`` per level, or as JSON. A tied tensor refers to its first path."""

    def __init__(self, tree: Any, most: int | None) -> None:
        self._most = most
        self._first: dict[int, str] = {}
        for path, tensor in _tensors("", tree):
            self._first.setdefault(id(tensor), path)

    def lines(self, path: str, value: Any, depth: int, indent: str = "") -> Iterator[list[str | tuple[str, str]]]:
        """Yield the lines of the part at ``path``, for :func:`say`, down to ``depth`` levels."""
        children = list(_children(value))
        if not children:
            yield [self._leaf(path, value)]
        for name, child in children[: self._most]:
            inner = join(path, name)
            is_short = not any(_tensors("", child)) and len(text_of(child)) <= _SHORT
            is_leaf = is_short or not any(True for _ in _children(child))
            yield [indent, (printable(name), "cyan"), ": ", self._leaf(inner, child) if is_leaf else (_summary(child), "dim")]
            if depth > 1 and not is_leaf:
                yield from self.lines(inner, child, depth - 1, f"{indent}  ")
        if left := len(children) - len(children[: self._most]):
            yield [indent, (f"… {left:,} more: {f'--key {path}' if path else f'--depth {DEPTH}'}", "dim")]

    def as_json(self, path: str, value: Any, depth: float) -> Any:
        """Return the part at ``path`` as JSON values, down to ``depth`` levels; deeper containers become a short text."""
        if isinstance(value, torch.Tensor | np.ndarray):
            facts = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            first = self._first.get(id(value), path)
            tied = {} if first == path else {"same_as": first}
            return {"array" if isinstance(value, np.ndarray) else "tensor": facts | tied}
        if isinstance(value, Mapping | list | tuple | ObjectParts) and depth < 1:
            return _summary(value)
        if isinstance(value, ObjectParts):
            return {"object": {"type": value.type, "content": self.as_json(path, value.content, depth)}}
        if isinstance(value, Mapping):
            return {name: self.as_json(join(path, name), child, depth - 1) for name, child in _children(value)}
        if isinstance(value, list | tuple):
            return [self.as_json(join(path, str(index)), child, depth - 1) for index, child in enumerate(value)]
        plain = value.item() if isinstance(value, np.generic) else value
        is_json = isinstance(plain, bool | str | None) or (isinstance(plain, int) and plain.bit_length() < _LONG)
        return plain if is_json or (isinstance(plain, float) and math.isfinite(plain)) else text_of(plain)

    def _leaf(self, path: str, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            first = self._first[id(value)]
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" + (f" = {first}" if first != path else "")
        if isinstance(value, np.ndarray):
            return f"array {value.dtype} {list(value.shape)}" + (f" {short(str(value))}" if 0 < value.size <= 4 else "")
        return short(text_of(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((key if isinstance(key, str) else text_of(key), each) for key, each in value.items())
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        yield from ((str(index), each) for index, each in enumerate(value))
    elif isinstance(value, ObjectParts):
        yield from _children(value.content)


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its path; a tied tensor once for each of its paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    for name, child in _children(value):
        yield from _tensors(join(path, name), child)


def _summary(value: Any) -> str:
    tensors = {id(tensor): tensor for _, tensor in _tensors("", value)}.values()
    size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    held = f", {len(tensors):,} tensor{'s' if len(tensors) > 1 else ''}, {decimal(size)}" if tensors else ""
    name = value.type if isinstance(value, ObjectParts) else type(value).__name__
    return f"{name} of {len(list(_children(value))):,}{held}"


def text_of(value: Any) -> str:
    """Return the ``repr`` of a value, also of an integer of any size."""
    try:
        return repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return hex(value) if isinstance(value, int) else f"{type(value).__name__} of {len(value):,}"


def short(text: str) -> str:
    """Return a text as one line that is not long."""
    line = " ".join(text.split())
    return line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}…"
