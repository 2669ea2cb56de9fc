"""The newest good checkpoint in some directories: what a run goes on from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from eventloop.checkpoint import AnyPath, check_regular, load, outline, store_of, verify_shards
from eventloop.errors import CheckpointDamagedError
from eventloop.log import get_logger
from eventloop.training.saves.pointer import file_named, read_pointer
from eventloop.training.saves.restore import is_resumable
from eventloop.training.saves.write import LAST
from eventloop.training.state import how_far

log = get_logger()


def find_checkpoint(*directories: AnyPath, known: Iterable[AnyPath] = ()) -> tuple[AnyPath, dict[str, Any]] | None:
    """Load the newest good checkpoint in some directories; None if there is none at all.

    Args:
        directories: where to look.
        known: other directories of which ``last_checkpoint`` may name a file, as in any of ``directories``.

    What ``last_checkpoint`` names comes first, then the other files; of several, the one whose run had come furthest, as the
    files themselves say (times of files are those of their copies). A file that is damaged or cannot be read is reported, and
    the one before it is tried; likewise a link, a FIFO or a device, and whatever has become of ``last_checkpoint``.

    Raises:
        CheckpointDamagedError: there are checkpoints, and none of them can be read.
        CheckpointError: a remote directory does not answer. An older checkpoint may be there, but was not asked for.
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
            log.info("this file is not a checkpoint of a run (a published copy?); trying the one before it", path=str(path))
    if damage:
        raise CheckpointDamagedError(f"no good checkpoint in {', '.join(map(str, directories))}: {'; '.join(damage)}")
    return None


def _newest_first(directories: Iterable[AnyPath], known: Iterable[AnyPath], damage: list[str]) -> Iterator[AnyPath]:
    files = {place: [path for path, _ in store_of(place).files(place)] for place in directories}
    pointers = [place for place in files if place / LAST in files[place]]
    named = [_pointed_to(place, [*files, *known], damage) for place in pointers]
    first = list(dict.fromkeys(path for path in named if path is not None))
    if len(first) > 1:
        first.sort(key=_rank, reverse=True)
    yield from first
    others = [path for paths in files.values() for path in paths if path.suffix == ".safetensors" and path.name[0] != "."]
    ranks = {path: _rank(path) for path in others}
    # What is beyond the newest is of another training, in the same directory, that had come further.
    limit = next((rank for rank in map(ranks.get, first) if rank is not None and rank.progress), None)
    for path in sorted(others, key=lambda path: (limit is None or ranks[path] <= limit, ranks[path]), reverse=True):
        if path not in first:
            yield path


class _Rank(NamedTuple):
    """How new a file is. One that cannot be read comes before all others: it is reported, and may be the newest."""

    unreadable: bool
    progress: tuple[int, ...]
    regular: bool
    name: str


def _rank(path: AnyPath) -> _Rank:
    regular = not path.name.startswith("best_")
    try:
        check_regular(path)
        return _Rank(False, how_far(outline(path)), regular, path.name)
    except (CheckpointDamagedError, OSError):
        return _Rank(True, (), regular, path.name)


def _pointed_to(directory: AnyPath, known: Iterable[AnyPath], damage: list[str]) -> AnyPath | None:
    """Return the file that ``last_checkpoint`` names, there or not, if the run may have written it."""
    way = read_pointer(directory)
    if way is None:
        return None
    named = file_named(directory, way, known)
    if named is not None and not named.is_dir():
        return named
    log.warning(
        "last_checkpoint does not name a file in a directory of this run; looking for checkpoints beside it",
        path=str(directory / LAST),
        names=way,
    )
    if named is None:
        damage.append(
            f"{directory / LAST} names {way[:200]!r}, which is in no directory that this run saves to; if that is the "
            "checkpoint to go on from, give its path or URL as resume="
        )
    return None
