"""What a run may tell instead of being exact, and what that excuses."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from trainbus.eventloop import CheckpointError, TrainingError

from .programs import Program
from .trials import Verdict


class Tell(NamedTuple):
    """A message that excuses programs with some features, in all parts or only in some."""

    message: str
    features: frozenset[str]
    parts: frozenset[str] = frozenset()
    errors: tuple[type[Exception], ...] = ()


TELLS: Final = (
    Tell(
        "entered epoch .* again",
        frozenset({"enumerate", "islice", "zip", "next in a range", "anchor", "new list"}),
        errors=(ArithmeticError, NameError),
    ),
    Tell("begins in the body of another run.train", frozenset({"next", "next in a range"}), errors=(TrainingError,)),
    Tell("changed while it was being copied", frozenset({"changed while copied"}), errors=(CheckpointError,)),
    Tell("stepped outside", frozenset({"step outside"})),
    Tell("entered epoch .* again", frozenset({"print", "mean"}), frozenset({"said"}), (ArithmeticError, NameError)),
)


def excused(program: Program, verdict: Verdict) -> str:
    """Return the message that excuses what a trial showed; empty if there is none."""
    notes = getattr(verdict.error, "__notes__", [])
    parts = {text.split(":")[0].split(".")[0] for text in verdict.differences}
    for tell in TELLS:
        if not tell.features & program.features:
            continue
        if verdict.error is not None:  # this very error, or a note of it, says why
            texts = [str(verdict.error), *notes]
            fits = isinstance(verdict.error, tell.errors) and any(re.search(tell.message, text) for text in texts)
        else:
            fits = any(re.search(tell.message, text) for text in verdict.told) and (not tell.parts or parts <= tell.parts)
        if fits:
            return tell.message
    return ""
