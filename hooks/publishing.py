"""Stripped copies of checkpoints, named by their content, to hand to others; and what killed processes leave behind."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from eventloop import CheckpointError, get_logger
from eventloop.checkpoint import TEMPORARY_PREFIX, link, load, remove, save

log = get_logger()

_STILL = 60.0  # seconds without a change after which nobody can be writing a temporary file


def publish_checkpoint(path: Path, keys: Iterable[str]) -> Path:
    """Write a copy with only ``keys``, beside the checkpoint, named ``<name>-<first 8 hex digits of its SHA-256>``.

    Args:
        path: a checkpoint.
        keys: of its tree, such as ``"state_dict"``.

    Returns:
        The path of the copy.

    Raises:
        CheckpointError: the checkpoint has none of these keys, cannot be read, or the copy cannot be written.
    """
    tree = load(path)
    stripped = {key: tree[key] for key in keys if key in tree}
    missing = [key for key in keys if key not in tree]
    if not stripped:
        raise CheckpointError(f"{path} has nothing to publish under {', '.join(missing)}; it has {', '.join(tree)}")
    if missing:
        log.warning("the checkpoint lacks keys to publish", path=str(path), missing=missing)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}.tmp")
    try:
        save(stripped, temporary)
        with temporary.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        published = path.with_name(f"{path.stem}-{digest[:8]}{path.suffix}")
        link(temporary, published)
    finally:
        remove(temporary)
    log.info("published", path=str(published), keys=list(stripped))
    return published


def sweep(directory: Path) -> None:
    """Remove temporary files that a killed process has left in ``directory``.

    Those changed within the last minute stay: another process (an evaluation beside the training) may be writing them.
    """
    for path in directory.glob(f"{TEMPORARY_PREFIX}*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _STILL:
                path.unlink()
                log.info("removed what a killed process left behind", path=str(path))
        except OSError as error:
            log.warning("a temporary file could not be removed", path=str(path), error=str(error))
