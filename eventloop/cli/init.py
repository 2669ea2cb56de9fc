"""``trainbus init``: write a training to begin with."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from eventloop.cli.common import say
from eventloop.errors import ConfigurationError

_KINDS = {".py": "train.py", ".toml": "train.toml"}
_PARTS = "parts.py"


def init(file: Path = Path("train.py"), /) -> None:
    """Write a training that runs, with the hooks that most people want: FILE, and parts.py with model, data and step beside it.

    Args:
        file: what to write: a script (.py) or a configuration for trainbus run (.toml).
    """
    if file.suffix not in _KINDS:
        raise ConfigurationError(f"{file}: give a name that ends in .py, for a script, or in .toml, for a configuration")
    if file.name == _PARTS:
        raise ConfigurationError(f"{file}: this name is that of the file with the parts; give another one")
    parts = file.with_name(_PARTS)
    there = [str(one) for one in (file, parts) if one.exists()]
    if there:
        raise ConfigurationError(
            f"{' and '.join(there)}: already there, and init overwrites nothing; give another name or folder"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    for path, template in ((parts, _PARTS), (file, _KINDS[file.suffix])):
        text = files("eventloop.cli").joinpath("templates", f"{template}.txt").read_text(encoding="utf-8")
        path.write_text(text.replace("train.py", file.name).replace("train.toml", file.name), encoding="utf-8")
    command = f"python {file}" if file.suffix == ".py" else f"trainbus run {file}"
    say(f"wrote {file} and {parts}; train with: {command}")
