"""``Capture`` copies the state of a run at a save point; a thread then writes the copy, and an event reports the file."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from itertools import chain
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbus.eventloop import events as ev
from trainbus.eventloop import platform
from trainbus.eventloop.checkpoint import AnyPath, Overlap, StageBuffer, stage, weights_only
from trainbus.eventloop.errors import ConfigurationError, RunCancelled
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import tensors_of, version_of
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.distributed.ranks import own_group
from trainbus.eventloop.training.optimizers import forget_options, stepping
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.alike import check_alike
from trainbus.eventloop.training.saves.apart import TreePlaces
from trainbus.eventloop.training.saves.contents import gather_rank, gather_state, loose_parameters
from trainbus.eventloop.training.saves.rank_states import RankStates
from trainbus.eventloop.training.saves.requests import SaveJob, SaveRequest
from trainbus.eventloop.training.saves.write import CheckpointWriter
from trainbus.eventloop.training.schema import SavedRank

if TYPE_CHECKING:
    from trainbus.eventloop.checkpoint.sharded import Parts, ShardStage

log = get_logger()


class Capture:
    """The saver of a loop of one's own: copies the state of the run for a save, and passes the copy to the writer."""

    hidden: tuple[type[BaseException], ...] = (RunCancelled,)

    def __init__(self, run: SavedRun) -> None:
        self._run = run
        self.writer: CheckpointWriter | None = None
        self.overlap: Overlap | None = None
        """Copies beside the training, once a save asked for them."""
        self.sharded = False
        """True if a model is sharded, so that every rank writes its part."""
        self._beside: SaveJob | None = None  # the last one that was copied beside the training
        self._buffer = StageBuffer()
        self._shard_stage: ShardStage | None = None
        self._states: RankStates | None = None
        self._compared: bool | None = None  # the ranks; True: their optimizers, too

    def open(self) -> CheckpointWriter:
        """Begin a run, and return its writer. A collective if a model is sharded."""
        run = self._run
        self.sharded = run.checkpoints.in_parts
        if self.sharded and run.coordinator.size > 1:
            own_group("saves")  # a collective: all ranks are here
        self.writer = CheckpointWriter(run)
        run.state.machine.defer(self._end_overlap)
        return self.writer

    def end_copies(self, given_up: str = "") -> None:
        """Wait for the copies that are made beside the training; with a reason, their save is given up."""
        overlap = self.overlap
        if overlap is not None and overlap.busy:
            if self._beside is not None:
                self._beside.given_up = given_up
            overlap.fence()

    def _end_overlap(self) -> None:
        overlap, self.overlap = self.overlap, None
        if overlap is not None:
            overlap.close()

    def check(self, request: SaveRequest) -> None:
        """Raise ConfigurationError for an option that does not work with this model, or a path that cannot be written."""
        request.check()
        if isinstance(request.path, Path) and (name := platform.refused_name(request.path)):
            raise ConfigurationError(f"cannot save to {request.path}: this system has no files named {name!r}; rename it")
        directory = request.path.parent
        if directory not in self._opened().made and directory.is_file():
            raise ConfigurationError(f"cannot save to {request.path}: {directory} is not a directory")

    def rehearse(self, request: SaveRequest) -> list[str]:
        """Stage the state in the save's buffer, and return its keys."""
        state = self._state(Path(), request.leave_out)  # hooks know a rehearsal by its path
        keys = list(state)
        if self.sharded:
            state, parts = self._take_shards(state, Path("check"), secrets.token_hex(4))
            parts.release()
        stage(state, self._buffer).release()
        return keys

    def way_to_resume(self, path: AnyPath) -> str:
        """Return ``resume="auto"``, if that finds the file."""
        found = self._run.work_dir is not None and path.parent in self._run.checkpointer.directories
        return 'resume="auto"' if found else f'resume="{path}"'

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

    def save(self, job: SaveJob) -> None:
        """Copy the state for a job and pass it to the writer; wait at most for the previous save.

        With several ranks, the file has the random states of all, and rank 0 writes it, or, if sharded, all do.
        """
        run, ranks, wanted = self._run, self._run.coordinator, job.request
        self._check_alike(ranks, with_optimizer="optimizer" not in wanted.leave_out)
        if ranks.size > 1:
            job.states = self._rank_states(ranks, job.token).put(gather_rank(run))
        if ranks.rank and not self.sharded:
            return
        start, writer = time.perf_counter(), self._opened()
        state = self._state(wanted.path, wanted.leave_out)
        if state.get("ranks") != []:
            job.states = None  # a hook has changed what the file has there, which may be tensors among the copied ones
        writer.make_way(job, self._agree)
        # In a validation hooks may have swapped in averaged weights, which only a copy made now holds.
        overlap = self._overlap() if wanted.staging == "overlap" and job.progress.stage == "train" else None
        if overlap is not None:
            self._beside = job
        if self.sharded:
            state, job.parts = self._take_shards(state, wanted.path, job.token, overlap)
        job.staged = stage(state, self._buffer, overlap=overlap)
        if job.parts is not None:
            job.parts.file = job.staged
        job.stall = time.perf_counter() - start
        writer.hand_over(job)

    def version(self) -> tuple[int, ...]:
        """Return numbers that change with the state; see :func:`state_version`."""
        # A forward pass replaces the parameters of a sharded model, and so their versions.
        return (self._run.state.version,) if self.sharded else state_version(self._run)

    def _overlap(self) -> Overlap:
        if self.overlap is None:
            self.overlap = Overlap(map(stepping, self._run.optimizers.values()))
        return self.overlap

    def _check_alike(self, ranks: Coordinator, *, with_optimizer: bool = True) -> None:
        """Compare the ranks before the first save: rank 0's file must have the state of all."""
        if ranks.size > 1 and (self._compared is None or (with_optimizer and not self._compared)):
            optimizers = self._run.optimizers if with_optimizer else {}
            check_alike(ranks, self._run.models, optimizers, loose_parameters(self._run))
            self._compared = with_optimizer

    def _rank_states(self, ranks: Coordinator, token: str) -> RankStates:
        if self._states is None:
            self._states = RankStates(ranks, token)
        return self._states

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
        self, state: dict[str, Any], path: AnyPath, token: str, overlap: Overlap | None = None
    ) -> tuple[dict[str, Any], Parts]:
        if self._shard_stage is None:
            from trainbus.eventloop.checkpoint.sharded import ShardStage  # takes half a second; only for sharded models

            self._shard_stage = ShardStage()
        group = None if self._run.coordinator.size == 1 else own_group("saves")
        places = TreePlaces(self._run.coordinator.layout, state)
        return self._shard_stage.copy_parts(state, path, token, group, places, overlap=overlap)


def state_version(run: SavedRun) -> tuple[int, int]:
    """Return numbers that change when the state of a run does: tensor versions show changes between mount points."""
    modules = chain.from_iterable(model.modules() for model in run.models.values())
    # Tensors made in inference mode have no version.
    return run.state.version, sum([version_of(tensor) for tensor in tensors_of(modules) if not tensor.is_inference()])
