"""``trainbus init``: write a training to begin with."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from trainbus.cli.common import say
from trainbus.eventloop.errors import ConfigurationError

_KINDS = {".py": "train.py", ".toml": "train.toml"}
_PARTS = "parts.py"


def init(file: Path = Path("train.py"), /) -> None:
    """Write a training to start from: FILE with the usual hooks, and parts.py with model, data and step beside it.

    Args:
        file: the file to write: a script (.py) or a configuration for trainbus run (.toml).
    """
    if file.suffix not in _KINDS:
        raise ConfigurationError(f"{file}: the name must end in .py, for a script, or in .toml, for a configuration")
    if file.name == _PARTS:
        raise ConfigurationError(f"{file}: init writes model, data and step to a file of this name; give another name")
    parts = file.with_name(_PARTS)
    texts = {path: _template(template, file) for path, template in ((parts, _PARTS), (file, _KINDS[file.suffix]))}
    there = [str(path) for path in (file, parts) if path.exists() and not (path == parts and _has(parts, texts[parts]))]
    if there:
        raise ConfigurationError(
            f"{' and '.join(there)}: exists already, and init never overwrites; give another name or folder"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    command = f"python {file}" if file.suffix == ".py" else f"trainbus run {file}"
    say(f"wrote {file} and {parts}; train with: {command}")


def _template(name: str, file: Path) -> str:
    text = files(__package__).joinpath("templates", f"{name}.txt").read_text(encoding="utf-8")
    return text.replace("train.py", file.name).replace("train.toml", file.name)


def _has(path: Path, text: str) -> bool:
    """Return whether the file is what init writes: that of a script and of a configuration beside each other."""
    return path.is_file() and path.read_bytes() == text.encode()
