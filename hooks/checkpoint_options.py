"""Checks of what CheckpointHook is given: counts, and names of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from eventloop import ConfigurationError, get_logger

log = get_logger()

MetricNames = Annotated[Sequence[str], Meta(description='a list of names, whose rules go into rule=["greater", "less"]')]

SUFFIX = ".safetensors"


def check_count(option: str, value: int, what: str) -> None:
    """Raise ConfigurationError unless ``value`` is a count of 1 or more, or -1."""
    if value < 1 and value != -1:
        raise ConfigurationError(f"{option}={value!r}: give {what}")


def warn_of_late_begin(label: str, save_begin: int, last: int | None, unit: str) -> None:
    """Warn of a first regular save to which a training does not come that ends with the epoch or iteration ``last``."""
    if last is not None and save_begin > last:
        log.warning(f"{label}(save_begin={save_begin}): this training ends with {unit} {last}, before its first regular save")


def checked_template(template: str) -> str:
    """Return the template of a file name.

    Raises:
        ConfigurationError: it is none, or gives two files one name.
    """
    try:
        name = template.format(1)
    except (IndexError, KeyError, ValueError, AttributeError):
        name = template
    if name == template or Path(name).name != name or not name.endswith(SUFFIX) or template.format(2) == name:
        raise ConfigurationError(
            f"filename_tmpl={template!r}: give a file name with one {{}} for the count that ends in {SUFFIX}, such as "
            f'"model_{{}}{SUFFIX}"'
        )
    return template
