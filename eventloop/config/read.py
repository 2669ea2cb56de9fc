"""Reads TOML, YAML and JSON. All three give tables, lists, text and numbers, and never anything that runs.

A file is read within bounds: of its size, of how deep it is nested, and of what aliases in YAML repeat.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eventloop.config.places import wrong
from eventloop.config.registry import did_you_mean
from eventloop.config.values import DEEPEST, check_bounds, kind_of
from eventloop.errors import ConfigurationError

SUFFIXES = (".toml", ".yaml", ".yml", ".json")

_LARGEST = 10_000_000
"""Bytes of a file."""

_MOST = 1_000_000
"""Values in a YAML file whose aliases are written out."""

# YAML 1.2's floats. PyYAML reads YAML 1.1, which takes 1e-3, the way everybody writes a learning rate, for text.
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")


def read(path: Path) -> dict[str, Any]:
    """Return the configuration in a file, by its suffix: ``.toml``, ``.yaml`` or ``.yml``, ``.json``.

    Raises:
        ConfigurationError: no such file, another suffix, a mistake in its syntax (with line and column), no table, or more
            than fits a configuration.
    """
    readers = dict(zip(SUFFIXES, (_toml, _yaml, _yaml, _json), strict=True))
    reader = readers.get(path.suffix.lower())
    if reader is None:
        hint = "; a Python file is a program: run it with python" if path.suffix == ".py" else _those_there(path)
        raise wrong(str(path), f"a configuration is a .toml, .yaml or .json file{hint}")
    try:
        _check_file(path)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise wrong(str(path), f"cannot be read: {error.strerror}{_those_there(path)}") from None
    except UnicodeDecodeError as error:
        raise wrong(str(path), f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    try:
        found = reader(text, path) if text.strip() else None
        check_bounds(found, str(path))
    except RecursionError:
        raise wrong(str(path), f"is nested too deeply; a configuration has at most {DEEPEST} levels") from None
    if not isinstance(found, dict):
        raise wrong(
            str(path), f"expected a table with model, data, optimizer …, got {'nothing' if not found else kind_of(found)}"
        )
    return found


def _check_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise wrong(str(path), "is a directory" if path.is_dir() else "is not a file but a device or a pipe")
    if (size := path.stat().st_size) > _LARGEST:
        raise wrong(str(path), f"is too large for a configuration: {size:,} bytes, at most {_LARGEST:,}")


def _those_there(path: Path) -> str:
    """Return the configurations in a folder, or beside a path that is none, as the end of a message."""
    folder = path if path.is_dir() else path.parent
    found = sorted(one.name for one in folder.glob("*") if one.suffix.lower() in SUFFIXES and one.is_file())
    if not found:
        return f"; there is none in {folder}"
    return did_you_mean(path.name, found) or f"; in {folder} there are {', '.join(found)}"


def _toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or of a number
        raise wrong(str(path), _why(error)) from None


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_table)
    except json.JSONDecodeError as error:
        raise wrong(str(path), f"{error.msg} (at line {error.lineno}, column {error.colno})") from None
    except ValueError as error:
        raise wrong(str(path), _why(error)) from None


def _table(entries: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(entries)
    if len(table) < len(entries):
        raise ValueError(f"the key {_first_twice([name for name, _ in entries])!r} is there twice in one table")
    return table


def _first_twice(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def _why(error: Exception) -> str:
    if "int_max_str_digits" in str(error):
        return "an integer has thousands of digits; text goes in quotes"
    return str(error)


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(
            f'{path}: YAML needs PyYAML: pip install "trainbus[yaml]"; TOML and JSON need nothing'
        ) from None

    class Loader(yaml.SafeLoader):
        """The safe loader, with the floats of YAML 1.2."""

        def construct_document(self, node: yaml.Node) -> Any:
            """Return the configuration of a node that is within bounds."""
            _check_node(node, path, {})
            try:
                return super().construct_document(node)
            except (AttributeError, KeyError, ValueError) as error:  # such as 2026-13-01, or !!bool maybe
                raise wrong(str(path), f"a value is not of its type: {_why(error)}") from None

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" {_at(error.problem_mark)}"
        raise wrong(str(path), f"{error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise wrong(str(path), str(error)) from None


def _check_node(node: Any, path: Path, sizes: dict[int, float]) -> float:
    """Return the number of values in a YAML node with its aliases written out; an alias within itself has no end.

    Raises:
        ConfigurationError: there are too many, or a key is there twice.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = math.inf
    children = node.value if isinstance(node.value, list) else []
    if node.id == "mapping":
        names = [key.value for key, _ in children if key.id == "scalar" and key.value != "<<"]
        if (twice := _first_twice(names)) is not None:
            raise wrong(str(path), f"the key {twice!r} is there twice in one table {_at(node.start_mark)}")
        children = [value for _, value in children]
    sizes[id(node)] = size = 1 + sum(_check_node(child, path, sizes) for child in children)
    if size > _MOST:
        what = "an alias stands within itself" if size == math.inf else f"aliases repeat more than {_MOST:,} values"
        raise wrong(str(path), f"{what} {_at(node.start_mark)}")
    return size


def _at(mark: Any) -> str:
    return f"(at line {mark.line + 1}, column {mark.column + 1})"
