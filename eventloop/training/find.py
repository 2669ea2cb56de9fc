"""The newest good checkpoint in some directories: what a run goes on from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from eventloop.checkpoint import Place, check_regular, load, store_of
from eventloop.checkpoint.shards import verify_shards
from eventloop.errors import CheckpointDamagedError
from eventloop.log import get_logger
from eventloop.training.pointer import file_named, read_pointer
from eventloop.training.resume import is_resumable
from eventloop.training.save_files import LAST

log = get_logger()


def find_checkpoint(*directories: Place, known: Iterable[Place] = ()) -> tuple[Place, dict[str, Any]] | None:
    """Load the newest good checkpoint in some directories; None if there is none at all.

    Args:
        directories: where to look.
        known: other directories of which ``last_checkpoint`` may name a file, as in any of ``directories``.

    The directory whose ``last_checkpoint`` was changed last comes first. A file that is damaged or cannot be read is
    reported, and the one before it is tried; likewise a link, a FIFO or a device, and whatever has become of
    ``last_checkpoint``.

    Raises:
        CheckpointDamagedError: there are checkpoints, and none of them can be read.
        CheckpointError: a remote directory does not answer. An older checkpoint may be there, but nobody asked for that.
    """
    damage: list[str] = []
    for path in _newest_first(directories, known, damage):
        try:
            check_regular(path)
            state = load(path)
            verify_shards(state, path)
        except CheckpointDamagedError as error:
            log.warning("a checkpoint is damaged; trying the one before it", path=str(path), error=str(error))
            damage.append(str(error))
        except FileNotFoundError:
            log.warning("a checkpoint is gone; trying the one before it", path=str(path))
        except OSError as error:
            log.warning("a checkpoint cannot be read; trying the one before it", path=str(path), error=str(error))
            damage.append(str(error))
        else:
            if is_resumable(state):
                return path, state
            log.info("this file is no checkpoint of a run (a published copy?); trying the one before it", path=str(path))
    if damage:
        raise CheckpointDamagedError(f"no good checkpoint in {', '.join(map(str, directories))}: {'; '.join(damage)}")
    return None


def _newest_first(directories: Iterable[Place], known: Iterable[Place], damage: list[str]) -> list[Place]:
    files = {place: _files(place) for place in directories}
    places = sorted(files, key=lambda place: files[place].get(place / LAST, 0.0), reverse=True)
    return list(dict.fromkeys(path for place in places for path in _in_order(place, files[place], [*files, *known], damage)))


def _in_order(directory: Place, files: dict[Place, float], known: list[Place], damage: list[str]) -> list[Place]:
    newest = _pointed_to(directory, known, damage) if directory / LAST in files else None
    names = [path for path in files if path.suffix == ".safetensors" and not path.name.startswith(".")]
    return [*([newest] if newest is not None else []), *sorted(names, key=files.__getitem__, reverse=True)]


def _files(directory: Place) -> dict[Place, float]:
    return {path: changed or 0.0 for path, changed in store_of(directory).files(directory)}


def _pointed_to(directory: Place, known: Iterable[Place], damage: list[str]) -> Place | None:
    """Return the file that ``last_checkpoint`` names, there or not, if the run may have written it."""
    way = read_pointer(directory)
    if way is None:
        return None
    named = file_named(directory, way, known)
    if named is not None and not named.is_dir():
        return named
    log.warning(
        "last_checkpoint names no file in a directory of this run; looking for checkpoints beside it",
        path=str(directory / LAST),
        names=way,
    )
    if named is None:
        damage.append(
            f"{directory / LAST} names {way[:200]!r}, which is in no directory that this run saves to; if that is the "
            "checkpoint to go on from, give its path or URL as resume="
        )
    return None
