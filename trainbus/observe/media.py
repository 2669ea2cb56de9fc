"""Read ``media.jsonl``. Unknown kinds and fields in the file, such as of a newer trainbus, are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec

from trainbus.hooks.writers.media import AnyReported, Reported, ReportedImage
from trainbus.observe.story import Cut

_KINDS: Final = {kind.__struct_config__.tag for kind in get_args(AnyReported)}


def read_reported(line: Mapping[str, Any]) -> AnyReported | None:
    """Return a line of the file as an object; None if its kind is unknown.

    Raises:
        msgspec.ValidationError: a field is damaged.
    """
    kind = line.get("kind")
    if isinstance(kind, str) and kind not in _KINDS:
        return None
    read: AnyReported = msgspec.convert(line, AnyReported)
    return read


def present(lines: Iterable[AnyReported], cuts: Sequence[Cut] = ()) -> dict[tuple[type[Reported], str], list[AnyReported]]:
    """Return the lines of each kind and name, by rising iteration: of images all, of the others the first and the last one.

    Leaves out what a resume abandoned, and what a resumed run has reported again.
    """
    found: dict[tuple[type[Reported], str], list[AnyReported]] = {}
    for line in lines:
        if any(line.time < cut.time and line.iter > cut.iter for cut in cuts):
            continue
        kept = found.setdefault((type(line), line.name), [])
        while kept and kept[-1].iter >= line.iter:
            kept.pop()
        if len(kept) > 1 and not isinstance(line, ReportedImage):
            kept.pop()  # a file may have a million of them
        kept.append(line)
    return {key: kept for key, kept in found.items() if kept}
