"""The words of a command line, before they are parsed."""

from __future__ import annotations

import os
from pathlib import Path

from trainbus.config.read import SUFFIXES


def expanded(word: str) -> str:
    """Return an argument with ``~`` replaced in ``--out=~/x``: a shell expands it in ``--out ~/x`` only."""
    option, equals, value = word.partition("=")
    return f"{option}={os.path.expanduser(value)}" if equals and option.startswith("-") else word  # noqa: PTH111


def with_auto(words: list[str]) -> list[str]:
    """Insert a value after a ``--resume`` or ``--dashboard`` of ``run`` that has none."""
    if words[:1] != ["run"]:
        return words
    for option, value, is_value in (("--resume", "newest", _is_run), ("--dashboard", "auto", str.isdecimal)):
        end = words.index(option) + 1 if option in words else 0
        if end and not (end < len(words) and is_value(words[end])):
            words = [*words[:end], value, *words[end:]]
    return words


def _is_run(word: str) -> bool:
    """Return True for a word that can name a run, and is neither a change nor a configuration."""
    is_change = "=" in word and "/" not in word.partition("=")[0]
    return not (word.startswith("-") or is_change or Path(word).suffix.lower() in SUFFIXES)
