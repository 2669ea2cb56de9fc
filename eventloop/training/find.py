"""The newest good checkpoint in some directories: what a run goes on from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eventloop.checkpoint import Place, RemotePath, load, place_of, store_of
from eventloop.checkpoint.shards import SHARDS, verify_shards
from eventloop.errors import CheckpointDamagedError
from eventloop.log import get_logger
from eventloop.training.resume import is_resumable
from eventloop.training.save_files import LAST

log = get_logger()


def find_checkpoint(*directories: Place) -> tuple[Place, dict[str, Any]] | None:
    """Load the newest good checkpoint in some directories; None if there is none at all.

    The directory whose ``last_checkpoint`` was changed last comes first. A file that is damaged or cannot be read is
    reported, and the one before it is tried; likewise whatever has become of ``last_checkpoint``.

    Raises:
        CheckpointDamagedError: there are checkpoints, and none of them can be read.
        CheckpointError: a remote directory does not answer. An older checkpoint may be there, but nobody asked for that.
    """
    damage: list[str] = []
    for path in _newest_first(directories):
        try:
            state = load(path)
            if isinstance(state, Mapping) and SHARDS in state:
                verify_shards(state, Path(str(path)))
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


def _newest_first(directories: Iterable[Place]) -> list[Place]:
    files = {place: _files(place) for place in directories}
    places = sorted(files, key=lambda place: files[place].get(place / LAST, 0.0), reverse=True)
    return list(dict.fromkeys(path for place in places for path in _in_order(place, files[place])))


def _in_order(directory: Place, files: dict[Place, float]) -> list[Place]:
    newest = _pointed_to(directory) if directory / LAST in files else None
    if newest is not None and newest.parent != directory:
        files = files | _files(newest.parent)
    names = [path for path in files if path.suffix == ".safetensors" and not path.name.startswith(".")]
    return [*([newest] if newest is not None else []), *sorted(names, key=files.__getitem__, reverse=True)]


def _files(directory: Place) -> dict[Place, float]:
    return {path: changed or 0.0 for path, changed in store_of(directory).files(directory)}


def _pointed_to(directory: Place) -> Place | None:
    """What ``last_checkpoint`` names, there or not. It is a hint: no digest guards its bytes."""
    pointer = directory / LAST
    try:
        newest = _place(directory, os.fsdecode(pointer.read_bytes()).strip())
        possible = newest.parent.is_dir() and not newest.is_dir()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("last_checkpoint cannot be read; looking for checkpoints beside it", path=str(pointer), error=str(error))
        return None
    if not possible or "\0" in newest.name:
        log.warning("last_checkpoint names no file; looking for checkpoints beside it", path=str(pointer))
        return None
    return newest


def _place(directory: Place, way: str) -> Place:
    there = place_of(way)
    return there if isinstance(there, RemotePath) else directory / way
