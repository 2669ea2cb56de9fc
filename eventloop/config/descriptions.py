"""Read the descriptions of options from docstrings."""

from __future__ import annotations

import inspect

from docstring_parser import DocstringStyle, parse


def option_descriptions(cls: type) -> dict[str, str]:
    """Return the descriptions of options by name, from ``Args:`` in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for one in cls.__mro__:
        for entry in parse(inspect.cleandoc(one.__doc__ or ""), DocstringStyle.GOOGLE).params:
            for name in entry.arg_name.split(","):  # "beta1, beta2: ..."
                found.setdefault(name.strip().lstrip("*"), " ".join((entry.description or "").split()))
    return found
