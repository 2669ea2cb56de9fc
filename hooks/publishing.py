"""Publish smaller copies of checkpoints, named by their content."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath

from trainbus.eventloop import CheckpointError, get_logger
from trainbus.eventloop.checkpoint import AnyPath, list_files, load, load_whole, note_scores, remove, scores_of, stage, write

log = get_logger()

_COPY = re.compile(r"(.+)-[0-9a-f]{8}")


def publish_checkpoint(path: AnyPath, keys: Iterable[str], directory: AnyPath) -> AnyPath:
    """Write a copy of a checkpoint with only ``keys`` (such as ``"state_dict"``) into ``directory``; return its path.

    The copy's name is ``<name>-<first 8 hex digits of its SHA-256>``. It has the scores of the checkpoint.

    Raises:
        CheckpointError: the checkpoint has none of these keys, cannot be read, or the copy cannot be written.
    """
    tree = load_whole(path) if isinstance(path, Path) else load(path)
    stripped = {key: tree[key] for key in keys_to_publish(keys, tree, str(path))}
    staged = stage(stripped)
    published = directory / f"{path.stem}-{staged.sha256()[:8]}{path.suffix}"
    digest = write(staged, published).digest
    if scores := scores_of(path):
        note_scores(published.parent, digest, [published.name], scores)
    log.info("checkpoint published", path=str(published), keys=list(stripped))
    return published


def remove_copies(directory: AnyPath, of: Iterable[str]) -> None:
    """Remove the published copies of these checkpoints, which are gone.

    Raises:
        CheckpointError: a copy cannot be removed.
    """
    gone = {PurePath(name).stem for name in of}
    for path, _ in list_files(directory) if gone else ():
        copied = _COPY.fullmatch(path.stem)
        if copied and copied[1] in gone:
            remove(path)
            log.debug("removed the published copy of an old checkpoint", path=str(path))


def keys_to_publish(keys: Iterable[str], there: Iterable[str], checkpoint: str) -> list[str]:
    """Return the ``keys`` that a checkpoint has (``there``). Warn about missing ones; raise CheckpointError if all are."""
    there, wanted = list(there), list(keys)
    missing = [key for key in wanted if key not in there]
    if len(missing) == len(wanted):
        raise CheckpointError(f"{checkpoint} has no key {', '.join(missing)} to publish; its keys are {', '.join(there)}")
    if missing:
        log.warning(
            "the checkpoint lacks some of published_keys", id="published-keys-missing", path=checkpoint, missing=missing
        )
    return [key for key in wanted if key not in missing]
