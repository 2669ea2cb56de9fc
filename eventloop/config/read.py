"""Reads TOML, YAML and JSON. All three give tables, lists, text and numbers, and never anything that runs."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from eventloop.config.places import wrong
from eventloop.config.values import kind_of
from eventloop.errors import ConfigurationError
from eventloop.registry import did_you_mean

SUFFIXES = (".toml", ".yaml", ".yml", ".json")

# YAML 1.2's floats. PyYAML reads YAML 1.1, which takes 1e-3, the way everybody writes a learning rate, for text.
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")


def read(path: Path) -> dict[str, Any]:
    """Return the configuration in a file, by its suffix: ``.toml``, ``.yaml`` or ``.yml``, ``.json``.

    Raises:
        ConfigurationError: no such file, another suffix, a mistake in its syntax (with line and column), or no table.
    """
    readers = dict(zip(SUFFIXES, (_toml, _yaml, _yaml, _json), strict=True))
    reader = readers.get(path.suffix.lower())
    if reader is None:
        hint = "; a Python file is a program: run it with python" if path.suffix == ".py" else _those_there(path)
        raise wrong(str(path), f"a configuration is a .toml, .yaml or .json file{hint}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise wrong(str(path), f"cannot be read: {error.strerror}{_those_there(path)}") from None
    except UnicodeDecodeError as error:
        raise wrong(str(path), f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    found = reader(text, path)
    if not isinstance(found, dict):
        raise wrong(
            str(path), f"expected a table with model, data, optimizer …, got {'nothing' if not found else kind_of(found)}"
        )
    return found


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
    except tomllib.TOMLDecodeError as error:
        raise wrong(str(path), str(error)) from None


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(str(path), f"{error.msg} (at line {error.lineno}, column {error.colno})") from None


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(
            f'{path}: YAML needs PyYAML: pip install "trainbus[yaml]"; TOML and JSON need nothing'
        ) from None

    class Loader(yaml.SafeLoader):
        """The safe loader, with the floats of YAML 1.2."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise wrong(str(path), f"{error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise wrong(str(path), str(error)) from None
