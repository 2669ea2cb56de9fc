"""Turn values into what the record of a run stores: plain values, without secrets."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import orjson
import torch

HIDDEN: Final = "(not stored)"
"""Stands for a value whose name says that it is a secret."""

_LONGEST: Final = 500  # characters of a text
_MOST_VALUES: Final = 1000
_DEEPEST: Final = 20
_SECRET: Final = re.compile(
    r"(^|[^a-z])(auth|authorization|(\w+_)?(token|password|passwd|passphrase|secret|credentials?)|pwd|(\w+_)?webhook(_url)?|"
    r"(\w+_)?(api|access|secret|private|account|auth|encryption|license)_?key(_id)?)$"
)
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s?#]+@")
_ADDRESS: Final = re.compile(r"https?://[^/?#@\s]+(?=[/?#])")
_QUERY: Final = re.compile(
    r"([?&][^=&\s#]*(?:token|key|secret|signature|sig|password|credential)[^=&\s#]*=)[^&\s#]+", re.IGNORECASE
)


def plain(value: Any) -> Any:
    """Return a value as numbers, texts, lists and mappings; of another object, the name of its class or function.

    Of lists and mappings, at most 1,000 values in all are taken. Only Python's own are read: others may load data.
    """
    return _plain(value, iter(range(_MOST_VALUES)))


def _plain(value: Any, left: Iterator[int], deep: int = 0) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str | PurePath | torch.dtype | torch.device):
        return str(value)[:_LONGEST]
    # Each entry takes one from what is left, so that a list of lists of lists ends as soon as a long one.
    if type(value) is dict and deep < _DEEPEST:
        return {str(name): _plain(one, left, deep + 1) for (name, one), _ in zip(value.items(), left, strict=False)}
    if type(value) in (list, tuple, set, frozenset) and deep < _DEEPEST:
        return [_plain(one, left, deep + 1) for one, _ in zip(value, left, strict=False)]
    if isinstance(value, type) or inspect.isroutine(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return type(value).__name__


def encodable(value: Any) -> Any:
    """Return a tree of plain values in which lone surrogates, which stand for bytes that are not UTF-8, are spelled out."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {encodable(key): encodable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(one) for one in value]
    return value


def as_json(value: Any, *options: Any) -> bytes:
    """Return what ``orjson.dumps`` returns, also for names that are not UTF-8 and for integers of any size."""
    try:
        return orjson.dumps(value, *options)
    except TypeError:
        return orjson.dumps(_with_digits(encodable(value)), *options)


def _with_digits(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_digits(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_digits(one) for one in value]
    large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return orjson.Fragment(str(value)) if large else value


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a tree of plain values: values with names like ``api_key`` are hidden, and URLs lose their credentials.

    Hidden is a value whose name ends in ``token``, ``password``, ``secret``, ``credentials`` or a kind of key. Of a URL that is
    named ``to``, only the host is left. Numbers and booleans are never hidden.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(one, name) for one in value]
    if not isinstance(value, str):
        return value
    if value and is_secret(name):
        return HIDDEN
    shown = _CREDENTIALS.sub("", value)
    if re.search(r"(^|[.-])to$", name) and (address := _ADDRESS.match(shown)):  # of a webhook: its path is the secret
        return f"{address[0]}/{HIDDEN}"
    return _QUERY.sub(rf"\1{HIDDEN}", shown)


def is_secret(name: str) -> bool:
    """Return True if a name says that its value is a secret: ``api_key``, ``wandbToken``, ``DB_PASSWORD``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    return bool(_SECRET.search(words))


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command line without secrets: values of ``--token=...``, ``--api-key ...`` and ``db.password=...``."""
    shown: list[str] = []
    hides = False
    for word in command:
        name, equals, value = word.partition("=")
        if hides and not word.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={without_secrets(value, name)}" if equals and "://" not in name else without_secrets(word))
        hides = not equals and word.startswith("-") and is_secret(word)
    return shown
