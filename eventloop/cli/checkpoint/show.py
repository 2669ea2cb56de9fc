"""``trainbus checkpoint show``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.filesize import decimal

from eventloop.checkpoint import CheckpointInfo, inspect, outline
from eventloop.cli.checkpoint.output import check_file, check_kind, printable, say, to_terminal
from eventloop.errors import CheckpointError

_DEPTH: Final = 2
_MANY: Final = 20  # entries of one level, where the user has not said what to look at
_LONG: Final = 4096  # bits of an integer that a reader of JSON may refuse as a number
_SHORT: Final = 60  # characters of a container that is shown in its line


def show(options: argparse.Namespace) -> int:
    """Show what a checkpoint holds."""
    check_file(options.file)
    check_kind(options.file)
    about, tree = inspect(options.file), outline(options.file)
    path, part = ("", tree) if options.key is None else find(tree, options.key)
    console = to_terminal()
    if options.json:
        _show_json(console, about, Places(tree), path, part, options.depth)
        return 0
    say(
        console,
        (printable(str(about.path)), "bold"),
        f"  {decimal(about.bytes)}, {len(about.tensors):,} tensors, {about.digest} ",
        ("(not verified)", "dim"),
    )
    most = _MANY if options.depth is None and options.key is None else None
    outlined = Lines(Places(tree), most)
    for line in outlined.of(path, part, options.depth or _DEPTH):
        say(console, *line)
    return 0


def _show_json(console: Console, about: CheckpointInfo, places: Places, path: str, part: Any, depth: int | None) -> None:
    facts = {"file": str(about.path), "bytes": about.bytes, "version": about.version, "digest": about.digest, "key": path}
    tree = as_json(places, path, part, depth or math.inf)
    console.out(json.dumps({**facts, "tree": tree}, indent=2), highlight=False)


def find(tree: Any, key: str) -> tuple[str, Any]:
    """Return the part of a tree at a dotted path, with the path of what holds it all.

    Keys may have dots themselves, and the beginning of some (``state_dict.head``) finds all of those.

    Raises:
        CheckpointError: there is no such part; the message says how far the path leads, and what is near.
    """
    part, rest, done = tree, key, ""
    while rest:
        children = dict(_children(part))
        # The longest key first: {"a": {"b": 1}, "a.b": 2} has two answers.
        name = next((each for each in sorted(children, key=len, reverse=True) if _begins(rest, each)), None)
        if name is None:
            group = {each: value for each, value in children.items() if _begins(each, rest)}
            if group:
                return done, group
            raise CheckpointError(_nothing_at(done, rest, list(children)))
        part, rest, done = children[name], rest[len(name) + 1 :], f"{done}.{name}" if done else name
    return done, part


def _begins(text: str, start: str) -> bool:
    return text == start or text.startswith(f"{start}.")


def _nothing_at(done: str, rest: str, names: list[str]) -> str:
    where = f"under {done!r}" if done else "in the checkpoint"
    if not names:
        return f"nothing {where}: that is a leaf"
    near = get_close_matches(rest, names, n=5, cutoff=0.5) or names[:8]
    return f"no {rest!r} {where}; there is {', '.join(map(printable, near))}" + (" …" if len(near) < len(names) else "")


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((key if isinstance(key, str) else _text(key), each) for key, each in value.items())
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        yield from ((str(index), each) for index, each in enumerate(value))


class Places:
    """Where each tensor of a tree was met first: tied ones are one tensor."""

    def __init__(self, tree: Any) -> None:
        self._first: dict[int, str] = {}
        self._walk("", tree)

    def other(self, path: str, tensor: torch.Tensor) -> str | None:
        """Where this tensor was met first, if that was not here."""
        first = self._first[id(tensor)]
        return first if first != path else None

    def _walk(self, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._first.setdefault(id(value), path)
        for name, child in _children(value):
            self._walk(_join(path, name), child)


class Lines:
    """A tree as lines of text, each a list of parts for `say`.

    Args:
        places: of the whole tree.
        most: entries of one level to show; None for all.
    """

    def __init__(self, places: Places, most: int | None) -> None:
        self._places = places
        self._most = most

    def of(self, path: str, value: Any, depth: int) -> Iterator[list[str | tuple[str, str]]]:
        """The lines of what is at `path`, down to `depth` levels."""
        if _has_children(value):
            yield from self._level(path, value, depth, "")
        else:
            yield [self._leaf(path, value)]

    def _level(self, path: str, value: Any, depth: int, indent: str) -> Iterator[list[str | tuple[str, str]]]:
        children = list(_children(value))
        shown = children if self._most is None else children[: self._most]
        for name, child in shown:
            inner = _join(path, name)
            start: list[str | tuple[str, str]] = [indent, (printable(name), "cyan"), ": "]
            if _is_leaf(child):
                yield [*start, self._leaf(inner, child)]
            else:
                yield [*start, (_summary(child), "dim")]
                if depth > 1:
                    yield from self._level(inner, child, depth - 1, f"{indent}  ")
        if left := len(children) - len(shown):
            yield [indent, (f"… {left:,} more: --key {path}" if path else f"… {left:,} more: --depth {_DEPTH}", "dim")]

    def _leaf(self, path: str, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            other = self._places.other(path, value)
            return _form(value) + (f" = {other}" if other is not None else "")
        if isinstance(value, np.ndarray):
            return f"array {value.dtype} {list(value.shape)}" + (f" {_short(str(value))}" if 0 < value.size <= 4 else "")
        return _short(_text(value))


def as_json(places: Places, path: str, value: Any, depth: float) -> Any:
    """A tree as what JSON can hold, down to `depth` levels; below there are texts that say what it is."""
    if isinstance(value, torch.Tensor):
        facts = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        other = places.other(path, value)
        return {"tensor": facts if other is None else {**facts, "same_as": other}}
    if isinstance(value, np.ndarray):
        return {"array": {"dtype": str(value.dtype), "shape": list(value.shape)}}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < _LONG else _text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, np.generic):
        return as_json(places, path, value.item(), depth)
    if isinstance(value, Mapping):
        if depth < 1:
            return _summary(value)
        return {name: as_json(places, _join(path, name), child, depth - 1) for name, child in _children(value)}
    if isinstance(value, list | tuple):
        if depth < 1:
            return _summary(value)
        return [as_json(places, _join(path, str(index)), child, depth - 1) for index, child in enumerate(value)]
    return _text(value)


def _is_leaf(value: Any) -> bool:
    """Whether it takes one line: no container, or a short one without tensors."""
    return not _has_children(value) or (not _tensors(value) and len(_text(value)) <= _SHORT)


def _has_children(value: Any) -> bool:
    return next(_children(value), None) is not None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for _, child in _children(value) for tensor in _tensors(child)]


def _summary(value: Any) -> str:
    tensors = {id(tensor): tensor for tensor in _tensors(value)}.values()
    size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    held = f", {len(tensors):,} tensor{'s' if len(tensors) > 1 else ''}, {decimal(size)}" if tensors else ""
    return f"{type(value).__name__} of {len(value):,}{held}"


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _text(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to make decimal digits of an integer that has thousands of them
        return hex(value) if isinstance(value, int) else f"{type(value).__name__} of {len(value):,}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}…"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
