"""The checkpoints of a run: when one is made and what goes into it, and the one that the run goes on from."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from eventloop import events as ev
from eventloop.checkpoint import SHARDS, AnyPath, as_path, is_sharded, load, verify_shards
from eventloop.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from eventloop.events import Event, Progress
from eventloop.log import get_logger
from eventloop.training.distributed.ranks import Ranks, saves_group, this_rank, world_size
from eventloop.training.optimizers import stepping
from eventloop.training.rng import get_rng_state
from eventloop.training.saves import restore as resume
from eventloop.training.saves.capture import SavePoints
from eventloop.training.saves.discover import find_checkpoint
from eventloop.training.saves.request import SaveRequest
from eventloop.training.saves.write import Parts
from eventloop.training.update import window_open

log = get_logger()

_OF_TORCH = (".pth", ".pt", ".ckpt", ".bin")


class Saved(resume.Resumable, Protocol):
    """The run whose checkpoints these are."""

    work_dir: Path | None
    resumed_from: AnyPath | None

    @property
    def progress(self) -> Progress:
        """How far the run has come."""

    def publish(self, event: type[Event], **payload: Any) -> None:
        """Publish an event of the run."""


class RunCheckpoints:
    """Saves the state of a run when it was asked for, and loads what the run goes on from.

    Args:
        run: whose state it is.
        source: ``"auto"``, a path or URL, or None, as ``resume=`` of the run.
        strict: False loads from a checkpoint of another model what fits.

    Raises:
        ConfigurationError: ``"auto"`` without a work dir.
    """

    def __init__(self, run: Saved, source: str | Path | None, *, strict: bool) -> None:
        self._run = run
        self._source = source if source is None or source == "auto" else as_path(source).absolute()
        if source == "auto" and run.work_dir is None:
            raise ConfigurationError('resume="auto" looks for checkpoints in the work_dir; give one, or a path as resume=')
        if isinstance(self._source, Path) and self._source.suffix in _OF_TORCH and not self._source.is_dir():
            raise ConfigurationError(
                f"resume={str(source)!r}: files of torch.save are imported first, without running what is in them: "
                f"`trainbus checkpoint import {source} {self._source.stem}.safetensors`, and resume from that"
            )
        self._strict = strict
        self._kept: list[AnyPath] = []
        self._saves: SavePoints | None = None
        self._ranks: Ranks | None = None
        self._rank_states: Sequence[Any] = ()
        self._sharded = False
        self._token = ""
        self._standing: tuple[bool, bool] | None = None

    # ------------------------------------------------------------------------------------------------------- begin

    def join(self, ranks: Ranks | None) -> None:
        """Save together with the other processes, if there are any. A collective where the model is sharded."""
        self._ranks = ranks
        self._sharded = any(is_sharded(model) for model in self._run.models.values())
        if self._sharded and ranks is not None:
            saves_group()  # made here, where all ranks are

    def open(self) -> None:
        """Take requests from now on, until the innermost scope ends."""
        run = self._run
        shards = self._take_shards if self._sharded else None
        optimizers = map(stepping, run.optimizers.values())
        saves = self._saves = SavePoints(run.bus, self._capture, run.work_dir, optimizers, shards)
        if run.state.agreement is not None:
            run.state.agreement.asked = lambda: saves.names
        self._run.state.scopes.defer(self._saves.close)

    @property
    def points(self) -> SavePoints:
        """Where saves are requested; raises ConfigurationError before the run has begun."""
        if self._saves is None:
            raise ConfigurationError("checkpoints are made inside a run: use `with Run(...) as run:`, or TrainLoop")
        return self._saves

    def place(self, directory: str | AnyPath | None = None) -> AnyPath:
        """Return the directory, or the work dir where it is None; raises ConfigurationError where there is neither."""
        if directory is not None:
            return as_path(directory)
        if self._run.work_dir is None:
            raise ConfigurationError("there is no place for checkpoints: give the run a work_dir")
        return self._run.work_dir

    @property
    def directories(self) -> list[AnyPath]:
        """Where the checkpoints of this run go: the work dir, if there is one, and where hooks save."""
        return list(dict.fromkeys(([self._run.work_dir] if self._run.work_dir is not None else []) + self._kept))

    def look_in(self, directory: str | AnyPath) -> None:
        """Look for checkpoints to go on from in this directory, too."""
        self._kept.append(as_path(directory))

    # -------------------------------------------------------------------------------------------------------- save

    def request(self, request: SaveRequest) -> None:
        """Note a wish for the next save point of a training; skip it in a validation or test of its own."""
        if self._run.state.has_trained or self._run.progress.stage == "train":
            self.points.request(request)
        else:
            self._refuse(request)

    def save_if_asked(self, *, force: bool = False) -> None:
        """Save if a hook or a thread has asked for it; in the middle of an accumulation window only by ``force``."""
        saves = self._saves if self._saves is not None else self.points
        if self._ranks is None and not self._run.state.save_now and not saves.requested:
            return  # as after nearly every iteration
        if not self._run.state.has_trained:
            return
        if not force and window_open(self._run.bus.hooks):
            return
        if self._take_save_now():
            saves.request(self._asked_now())
        if self._ranks is not None:
            self._gather(self._ranks, saves, force=force)
        if saves.requested:
            # In a validation hooks may have lent the model other weights (averages), which only a copy made now holds.
            progress = self._run.progress
            at_once = progress.stage != "train"
            saves.save(self._version(), self._run.publish, progress, at_once=at_once, standing=self._standing)

    def end(self) -> None:
        """Save what was asked for last, and wait until all is written; what a run without training was asked for is skipped."""
        self.save_if_asked(force=True)
        points = self.points
        if not self._run.state.has_trained:
            asked = points.requests
            points.adopt([])
            for request in [*asked, self._asked_now()] if self._take_save_now() else asked:
                self._refuse(request)
        points.wait()  # on a bus that stays open, too: what comes next may want to resume from it

    def _refuse(self, request: SaveRequest) -> None:
        self.points.refuse(request, self._run.progress, "only a training saves, and this run has not trained")

    def _gather(self, ranks: Ranks, saves: SavePoints, *, force: bool) -> None:
        """Have all processes save the same, if anything, and rank 0 know the random states of all."""
        if force:  # a file that could not be written, only rank 0 knows of, and may want another one for it
            everyones = ranks.gather(saves.requests)
            ranks.check_first_has_all([[request.path.name for request in requests] for requests in everyones])
            saves.adopt(everyones[0])
        elif saves.requested and self._run.state.agreement is not None:
            self._run.state.agreement.confirm()
        if saves.requested:
            own = {"rng": self._run.state.validation_rng or get_rng_state(), "data": self._run.data_state()}
            standing = saves.standing(self._version())
            self._rank_states, tokens, standings = zip(*ranks.gather((own, secrets.token_hex(4), standing)), strict=True)
            self._token = tokens[0]
            if self._sharded:  # all do the same, however far each is with the save before
                held, busy = zip(*standings, strict=True)
                self._standing = all(held), any(busy)
        if ranks.rank and not self._sharded:
            saves.adopt([])

    def _take_save_now(self) -> bool:
        """Return True, once, if a checkpoint was asked for, by whichever rank."""
        state = self._run.state
        if state.agreement is None:
            asked, state.save_now = state.save_now, False
            return asked
        if not state.agreement.save:
            return False
        state.agreement.save = state.save_now = False
        return True

    def _version(self) -> object:
        """What is equal while the state is the same: code between mount points moves the tensors' own versions only."""
        if self._sharded:  # a forward pass exchanges the parameters of the model, and with them their versions
            return self._run.state.version
        tensors = (t for model in self._run.models.values() for t in chain(model.parameters(), model.buffers()))
        # Tensors made in inference mode have none: they can only be changed there.
        return self._run.state.version, sum(tensor._version for tensor in tensors if not tensor.is_inference())

    def _asked_now(self) -> SaveRequest:
        return SaveRequest(self.place() / f"iter_{self._run.counters.iter}.safetensors")

    def _capture(self, request: SaveRequest) -> dict[str, Any]:
        state = resume.gather(self._run, optimizers="optimizer" not in request.leave_out)
        if self._rank_states:
            state["ranks"] = list(self._rank_states)
        self._run.publish(ev.BeforeSaveCheckpoint, path=str(request.path), checkpoint=state)
        for key in request.leave_out:
            state.pop(key, None)
            resume.forget_options(state["options"], key)
        return state

    def _take_shards(self, state: dict[str, Any], path: Path) -> tuple[dict[str, Any], Parts]:
        from eventloop.checkpoint.sharded import take_shards  # a second to import, for whom it is worth it

        group = None if self._ranks is None else saves_group()
        return take_shards(state, path, self._token or secrets.token_hex(4), group)

    # -------------------------------------------------------------------------------------------------------- load

    def load(self) -> None:
        """Put the state of the checkpoint that the run goes on from into it, if there is one."""
        if self._source is None:
            return
        run = self._run
        found = self._find()
        if found is None:
            log.info("no checkpoint to resume from; the run begins", work_dir=str(run.work_dir))
            return
        path, state = found
        if self._sharded or SHARDS in state:
            state = self._with_shards(state, path)
        run.publish(ev.AfterLoadCheckpoint, path=str(path), checkpoint=state)
        resume.apply(run, state, strict=self._strict)
        run.resumed_from = path
        run.state.resumed = True
        self._run.state.progress = run.counters.snapshot()
        log.info("resumed", path=str(path), epoch=run.counters.epoch, iter=run.counters.iter)

    def _find(self) -> tuple[AnyPath, Any] | None:
        """Load what to go on from: what rank 0 finds, on all ranks."""
        found: tuple[AnyPath, Any] | None = None
        if self._ranks is None or not self._ranks.rank:
            if self._source == "auto":
                found = find_checkpoint(self.place(), *self._kept)
            elif self._source is not None:
                found = self._load_named(as_path(self._source))
        if self._ranks is None:
            return found
        path = self._ranks.from_first(None if found is None else found[0])
        if path is None:
            return None
        state = load(path) if found is None else found[1]
        return path, resume.state_of_rank(state, this_rank(), world_size())

    def _load_named(self, place: AnyPath) -> tuple[AnyPath, Any]:
        if not place.is_dir():
            try:
                state = load(place)
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(
                    f"resume={str(place)!r}: there is no such file; give the path or URL of a checkpoint, or of a directory "
                    'with some, or resume="auto", which takes the newest one in the work dir and begins where it finds none'
                ) from error
            verify_shards(state, place)
            return place, state
        found = find_checkpoint(place, known=self._kept)
        if found is None:
            raise CheckpointError(
                f'there is no checkpoint of a run in {place} to resume from; resume="auto" begins where it finds none'
            )
        return found

    def _with_shards(self, state: Mapping[str, Any], path: Any) -> dict[str, Any]:
        from eventloop.checkpoint.sharded import put_shards, spread  # as above

        like = resume.placement(self._run.models, self._run.optimizers)
        if SHARDS not in state:
            return spread(state, like)
        return put_shards(state, path, like, None if self._ranks is None else self._ranks.group)
