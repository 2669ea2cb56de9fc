"""Capture (copy) the state of a run at a save point; a thread then writes the copy, and an event reports the file.

A request for a state that the last file already holds adds a name to that file. States are equal if their versions are equal
(see :func:`state_version`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbus.eventloop import events as ev
from trainbus.eventloop.checkpoint import AnyPath, Overlap, StageBuffer, is_sharded, stage, weights_only
from trainbus.eventloop.errors import ConfigurationError, RunCancelled
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.plain import numbers_in, plain
from trainbus.eventloop.privates import tensors_of, version_of
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.distributed.ranks import own_group
from trainbus.eventloop.training.optimizers import forget_options, stepping
from trainbus.eventloop.training.saves.alike import check_alike
from trainbus.eventloop.training.saves.contents import SavedRun, gather_rank, gather_state, loose_parameters
from trainbus.eventloop.training.saves.rank_states import RankStates
from trainbus.eventloop.training.saves.requests import SaveJob, SaveRequest, merged
from trainbus.eventloop.training.saves.restore import resume_line
from trainbus.eventloop.training.saves.write import CheckpointWriter
from trainbus.eventloop.training.schema import SavedRank

if TYPE_CHECKING:
    from trainbus.eventloop.checkpoint.sharded import Parts, ShardStage

log = get_logger()


class Capture:
    """Capture the state of the run once for all requests of a save point, and pass the copy to the writer."""

    hidden: tuple[type[BaseException], ...] = (RunCancelled,)

    def __init__(self, run: SavedRun) -> None:
        self._run = run
        self.due: list[SaveRequest] = []
        self.writer: CheckpointWriter | None = None
        self.overlap: Overlap | None = None
        """Copies beside the training, once a save asked for them."""
        self.sharded = False
        """True if a model is sharded, so that every rank writes its part."""
        self._last: SaveJob | None = None
        self._left: list[Path] = []
        self._names: set[Path] = set()  # all paths of the last file, links included
        self._buffer = StageBuffer()
        self._shard_stage: ShardStage | None = None
        self._states: RankStates | None = None
        self._elsewhere: frozenset[Any] | None = None  # see ShardStage; None before the ranks were compared
        self._compared = False  # the optimizers, too
        self._token = ""
        self._scores: tuple[tuple[int, ...], Mapping[str, Any]] = (), {}
        """The version of the state that was validated last, and its metrics."""

    def open(self) -> None:
        """Begin a run. A collective if a model is sharded."""
        run = self._run
        self.sharded = any(map(is_sharded, run.models.values()))
        if self.sharded and run.coordinator.size > 1:
            own_group("saves")  # a collective: all ranks are here
        self.writer = CheckpointWriter(run, run.bus, run.saves.apart)
        run.state.machine.defer(self._end_overlap)

    def left_to_others(self) -> list[str]:
        """Return the files of the last save that another replica group was to write, as far as they are not there."""
        left, self._left = self._left, []
        return [str(path) for path in left if not path.exists()]

    def end_copies(self, given_up: str = "") -> None:
        """Wait for the copies that are made beside the training; with a reason, their save is given up."""
        overlap = self.overlap
        if overlap is not None and overlap.busy:
            if self._last is not None:
                self._last.given_up = given_up
            overlap.fence()

    def _end_overlap(self) -> None:
        overlap, self.overlap = self.overlap, None
        if overlap is not None:
            overlap.close()

    def check(self, request: SaveRequest) -> None:
        """Raise ConfigurationError for an option that does not work with this model, or a path that cannot be written."""
        request.check()
        directory = request.path.parent
        if directory not in self._opened().made and directory.is_file():
            raise ConfigurationError(f"cannot save to {request.path}: {directory} is not a directory")

    def rehearse(self, request: SaveRequest) -> list[str]:
        """Stage the state in the save's buffer, and return its keys."""
        state = self._state(Path(), request.leave_out)  # hooks know a rehearsal by its path
        keys = list(state)
        if self.sharded:
            state, parts = self._take_shards(state, Path("check"))
            parts.release()
        self._release_last()
        stage(state, self._buffer).release()
        return keys

    def resume_line(self) -> str:
        """Return the line that tells how to continue a training that ended early; empty if nothing can be resumed from."""
        run, writer = self._run, self.writer
        if writer is None or run.rank or not run.state.has_trained:
            return ""
        path = writer.newest or run.checkpoints.resumed_from
        found = path is not None and run.work_dir is not None and path.parent in run.saves.directories
        return resume_line(path, 'resume="auto"' if found else f'resume="{path}"')

    def gather(self) -> dict[str, Any]:
        """Return the state as a tree of tensors (by reference) and plain values. A collective."""
        run, ranks = self._run, self._run.coordinator
        if self.sharded:
            raise ConfigurationError(
                "run.checkpoints.gather_state() does not support sharded models: save with run.checkpoints.save() and resume "
                "from that directory"
            )
        self._check_alike(ranks)
        everyones = ranks.gather(gather_rank(run)) if ranks.size > 1 else ()
        plain: dict[str, Any] = weights_only(self._state("", ranks=everyones))
        return plain

    def _opened(self) -> CheckpointWriter:
        assert self.writer is not None  # noqa: S101 - requests need an open run
        return self.writer

    def save(self, requests: list[SaveRequest]) -> None:
        """Capture the state for all requests and pass it to the writer; wait at most for the previous save.

        With several ranks, the file has the random states of all, and rank 0 writes it; if sharded, all ranks decide alike,
        even if only some have finished the previous save. Of several replica groups, the first one saves.
        """
        if (replicas := self._run.host.replicas) is not None and not replicas.first:
            self._left = [request.path for request in requests]
            log.debug("another replica group saves", names=[*map(str, self._left)])
            return
        ranks, writer, wanted, states = self._run.coordinator, self._opened(), merged(requests), None
        self._check_alike(ranks, with_optimizer="optimizer" not in wanted.leave_out)
        held, busy = self._standing(wanted)
        paths = list(dict.fromkeys(request.path for request in requests))
        failed = {number for number, path in enumerate(paths) if path in writer.failed}
        if ranks.size > 1:
            if self.sharded:
                self._token, held, busy, failed = ranks.merged(
                    (secrets.token_hex(4), held, busy, failed),
                    lambda one, two: (one[0], one[1] and two[1], one[2] or two[2], one[3] | two[3]),
                )
            else:
                self._token, held, busy = ranks.from_first(lambda: (secrets.token_hex(4), held, busy))
            skips = held or (wanted.busy == "skip" and busy)
            states = None if skips else self._rank_states(ranks).put(gather_rank(self._run))
            if ranks.rank and not self.sharded:
                return
        start = time.perf_counter()
        # What the file has: the iteration or epoch that ends here counts.
        progress = self._run.state.counters.snapshot(self._run.state.progress.stage)
        if held and self._last is not None:
            paths = [path for number, path in enumerate(paths) if path not in self._names or number in failed]
            if paths:
                writer.hand_over(SaveJob(wanted, paths, progress, source=self._last))
                self._names.update(paths)
        elif wanted.busy == "skip" and busy:
            writer.skip(SaveJob(wanted, paths, progress, given_up="another checkpoint is being written"))
        else:
            version = self._version()
            job = SaveJob(wanted, paths, progress, version=version, states=states)
            job.scores = self._scores[1] if self._scores[0] == version else {}
            state = self._state(wanted.path, wanted.leave_out)
            if state.get("ranks") != []:
                job.states = None  # a hook has changed what the file has there, which may be tensors among the copied ones
            if wanted.busy == "wait":
                self._run.saves.wait()
            writer.replace(wanted.path, self._agree if wanted.busy == "replace" else bool)
            # In a validation hooks may have swapped in averaged weights, which only a copy made now holds.
            beside = wanted.staging == "overlap" and progress.stage == "train"
            if beside and self.overlap is None:
                self.overlap = Overlap(map(stepping, self._run.optimizers.values()))
            overlap = self.overlap if beside else None
            self._release_last()
            if self.sharded:
                state, job.parts = self._take_shards(state, wanted.path, overlap)
            job.staged = stage(state, self._buffer, overlap=overlap)
            job.stall = time.perf_counter() - start
            writer.hand_over(job)
            self._last, self._names = job, set(paths)  # last: after Ctrl-C above, no file may hold this state

    def _check_alike(self, ranks: Coordinator, *, with_optimizer: bool = True) -> None:
        """Compare the ranks before the first save: rank 0's file must have the state of all."""
        if ranks.size > 1 and (self._elsewhere is None or (with_optimizer and not self._compared)):
            optimizers = self._run.optimizers if with_optimizer else {}
            self._elsewhere = check_alike(ranks, self._run.models, optimizers, loose_parameters(self._run))
            self._compared = with_optimizer

    def note_scores(self, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of a validation of the present state: for its last file, and for one that is requested now."""
        version = self._version()
        self._scores = version, plain(numbers_in(metrics))
        if (last := self._last) is not None and last.version == version:
            self._opened().score(last, self._scores[1])

    def _rank_states(self, ranks: Coordinator) -> RankStates:
        if self._states is None:
            self._states = RankStates(ranks, self._token)
        return self._states

    def _release_last(self) -> None:
        """Release the memory of the last state, which stays for further names in a store, unless it is being written."""
        if self._last is not None and not self._opened().busy:
            self._last.release()

    def _standing(self, wanted: SaveRequest) -> tuple[bool, bool]:
        """Return whether the last file satisfies ``wanted`` for the current state, and whether the writer is busy."""
        last, writer = self._last, self._opened()
        held = (
            last is not None
            and last.version[0] == self._run.state.version  # the usual case is another one, and needs no look at the tensors
            and last.version == self._version()
            and not last.lost
            and last.request.leave_out <= wanted.leave_out
        )
        return held, writer.busy

    def _version(self) -> tuple[int, ...]:
        # A forward pass replaces the parameters of a sharded model, and so their versions.
        return (self._run.state.version,) if self.sharded else state_version(self._run)

    def _state(self, path: AnyPath | str, leave_out: Collection[str] = (), ranks: Sequence[SavedRank] = ()) -> dict[str, Any]:
        """Return the state of the run by reference, with the keys of hooks and without ``leave_out``."""
        run = self._run
        state = gather_state(run, gather_rank(run), ranks, leave_out)
        run.publish(ev.BeforeSaveCheckpoint, path=str(path), checkpoint=state)
        for key in leave_out:
            state.pop(key, None)
            forget_options(state.get("options", {}), key)
        return state

    def _agree(self, can: bool) -> bool:
        """Return whether all ranks that write can."""
        return self._run.coordinator.merged(can, and_) if self.sharded else can

    def _take_shards(
        self, state: dict[str, Any], path: AnyPath, overlap: Overlap | None = None
    ) -> tuple[dict[str, Any], Parts]:
        if self._shard_stage is None:
            from trainbus.eventloop.checkpoint.sharded import ShardStage  # takes half a second; only for sharded models

            self._shard_stage = ShardStage()
        self._shard_stage.written_elsewhere = self._elsewhere or ()
        group = None if self._run.coordinator.size == 1 else own_group("saves")
        return self._shard_stage.copy_parts(state, path, self._token or secrets.token_hex(4), group, overlap=overlap)


def state_version(run: SavedRun) -> tuple[int, int]:
    """Return numbers that change when the state of a run does: tensor versions show changes between mount points."""
    modules = chain.from_iterable(model.modules() for model in run.models.values())
    # Tensors made in inference mode have no version.
    return run.state.version, sum([version_of(tensor) for tensor in tensors_of(modules) if not tensor.is_inference()])
