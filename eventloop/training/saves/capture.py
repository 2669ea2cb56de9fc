"""Capture the state of a run for the saves that its hooks request.

A request goes through four steps. It waits for the next save point, after the last handler of a mount point. The run captures
(copies) its state and continues. A thread writes the copy. An event reports whether the file is durable, failed or was skipped.

Requests at one save point become one write under several names. A request for a state that the last file already holds adds a
name to that file. States are equal if their versions are equal (see :meth:`Saves._version`).
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from eventloop import events as ev
from eventloop.checkpoint import AnyPath, Overlap, StageBuffer, as_path, is_sharded, stage, weights_only
from eventloop.errors import ConfigurationError, RunCancelled
from eventloop.privates import tensors_of, version_of
from eventloop.training.agree import Agreement
from eventloop.training.data import Feeds
from eventloop.training.distributed.ranks import Ranks, own_group
from eventloop.training.optimizers import forget_options, stepping
from eventloop.training.saves.contents import SavedRun, gather_rank, gather_state
from eventloop.training.saves.resumable import resume_line
from eventloop.training.saves.write import CheckpointWriter, SaveJob, SaveRequest, merged
from eventloop.training.schema import SavedRank
from eventloop.training.state import Counters


class Saves:
    """Collect requests, capture the state of the run once for all of them, and pass it to the writer."""

    hidden: tuple[type[BaseException], ...] = (RunCancelled,)
    """Errors that the user may not get to see."""

    def __init__(self, run: SavedRun, feeds: Feeds) -> None:
        self._run = run
        self.requests: list[SaveRequest] = []
        self._last: SaveJob | None = None
        self._names: set[AnyPath] = set()  # all paths of the last file, links included
        self._buffer = StageBuffer()
        self._writer: CheckpointWriter | None = None
        self.overlap: Overlap | None = None
        """Copies beside the training, once a save asked for them."""
        self.feeds = feeds
        self.directories: list[AnyPath] = [] if run.work_dir is None else [run.work_dir]
        """The work dir, if any, and the directories of hooks."""
        self.ranks: Ranks | None = None
        self.sharded = False
        """True if a model is sharded, so that every rank writes its part."""
        self._ranks_saved: Sequence[SavedRank] = ()
        self._token = ""
        self.resumes_training_at: Counters | None = None
        """The counts in the last save, if a run that resumes from it does not begin with a validation."""

    def open(self, ranks: Ranks | None) -> None:
        """Accept requests until the innermost scope ends. A collective if a model is sharded."""
        run = self._run
        self.ranks = ranks
        self.sharded = any(map(is_sharded, run.models.values()))
        if self.sharded and ranks is not None:
            own_group("saves")  # a collective: all ranks are here
        self._writer = CheckpointWriter(run, run.bus)
        run.state.own.files = lambda: [request.path.name for request in self.requests]
        run.state.scopes.defer(self._end_overlap)

    def _end_overlap(self) -> None:
        overlap, self.overlap = self.overlap, None
        if overlap is not None:
            overlap.close()

    def directory(self, directory: str | AnyPath | None = None) -> AnyPath:
        """Return ``directory``, or the work dir if it is None; raise ConfigurationError if there is neither."""
        if directory is not None:
            return as_path(directory)
        if self._run.work_dir is None:
            raise ConfigurationError(f"the run has no directory for checkpoints: {self._run.work_dir_advice}")
        return self._run.work_dir

    def request(self, request: SaveRequest) -> None:
        """Queue a request for the next save point; skip it if the run does not train."""
        writer = self._opened()
        if not (self._run.state.has_trained or self._run.state.progress.stage == "train"):
            self._refuse(request)
            return
        request.check(sharded=self.sharded)
        directory = request.path.parent
        if directory not in writer.made and directory.exists() and not directory.is_dir():
            raise ConfigurationError(f"cannot save to {request.path}: {directory} is not a directory")
        self.requests.append(request)

    def check(self, request: SaveRequest, *, copy: bool) -> list[str]:
        """Raise the error that a save would raise; with ``copy``, stage the state in the save's buffer and return its keys."""
        self._opened()
        request.check(sharded=self.sharded)
        if not copy:
            return []
        state = self._state(Path(), request.leave_out)  # hooks know a check by its path
        keys = list(state)
        if self.sharded:
            state, _ = self._take_shards(state, Path("check"))
        stage(state, self._buffer).release()
        return keys

    # -------------------------------------------------------------------------------------------------- save points

    def save_if_asked(self, *, force: bool = False) -> None:
        """Save if hooks or threads requested it; inside an accumulation window only with ``force``."""
        state = self._run.state
        if not self.requests and not state.agreed.save and not (force and self.ranks is not None):
            return  # the usual case
        if not state.has_trained or (not force and state.window_open):
            return
        self._add_asked_now()
        standing = None if self.ranks is None else self._agree(self.ranks, force=force)
        if self.requests:
            self._save(standing)

    def end(self) -> None:
        """Save the last requests and wait until all files are written. A run that has not trained skips them."""
        self.save_if_asked(force=True)
        if not self._run.state.has_trained:
            self._add_asked_now()
            asked, self.requests = self.requests, []
            for request in asked:
                self._refuse(request)
        self.wait()  # even if the bus stays open: the next run may resume from the file

    def resume_line(self) -> str:
        """Return the line that tells how to continue a training that ended early; empty if nothing can be resumed from."""
        run, writer = self._run, self._writer
        if writer is None or run.rank or not run.state.has_trained:
            return ""
        path = writer.newest or run.resumed_from
        found = path is not None and run.work_dir is not None and path.parent in self.directories
        return resume_line(path, 'resume="auto"' if found else f'resume="{path}"')

    def wait(self) -> None:
        """Wait until no save is being written."""
        writer = self._opened()
        with self._run.bus.span("waiting for checkpoints"):
            writer.wait()

    def settle(self, seconds: float) -> None:
        """Wait for the files that are being written, for at most ``seconds``."""
        if self._writer is not None:
            self._writer.wait(seconds)

    def close(self, seconds: float) -> None:
        """Accept no more requests, and wait for the files that are being written, for at most ``seconds``."""
        if self._writer is not None:
            self._writer.close(seconds)

    def gather(self) -> dict[str, Any]:
        """Return the state as a tree of tensors (by reference) and plain values. A collective."""
        if self.sharded:
            raise ConfigurationError(
                "run.gather_state() does not support sharded models: save with run.request_save() and resume from that "
                "directory"
            )
        if self.ranks is not None:
            self._ranks_saved = self.ranks.gather(gather_rank(self._run, self.feeds))
        plain: dict[str, Any] = weights_only(self._state(""))
        return plain

    def _opened(self) -> CheckpointWriter:
        if self._writer is None:
            raise ConfigurationError("checkpoints need an open run: use `with Run(...) as run:`, or TrainLoop")
        return self._writer

    def _refuse(self, request: SaveRequest) -> None:
        reason = "only a training saves, and this run has not trained"
        self._opened().skip(SaveJob(request, [request.path], self._run.state.counters.snapshot(), given_up=reason))

    def _add_asked_now(self) -> None:
        """Queue a request, once, if ``checkpoint_now`` was called on any rank."""
        state = self._run.state
        if not state.agreed.save:
            return
        state.own.save = state.agreed.save = False
        self.requests.append(SaveRequest(self.directory() / f"iter_{state.counters.iter}{self._run.checkpoint_suffix}"))

    def _agree(self, ranks: Ranks, *, force: bool) -> tuple[bool, bool] | None:
        """Make all ranks save the same files, with all random states; if sharded, return their joint :meth:`_standing`."""
        standing = None
        if force:  # rank 0 alone sees a failed write, after which it may request another file
            everyones = ranks.gather(self.requests)
            ranks.check_first_has_all([[request.path.name for request in requests] for requests in everyones])
            self.requests = everyones[0]
        elif self.requests and isinstance(self._run.state.channel, Agreement):
            self._run.state.channel.confirm()
        if self.requests:
            own = (gather_rank(self._run, self.feeds), secrets.token_hex(4), self._standing(merged(self.requests)))
            self._ranks_saved, tokens, standings = zip(*ranks.gather(own), strict=True)
            self._token = tokens[0]
            if self.sharded:  # all ranks must decide alike, even if only some have finished the previous save
                held, busy = zip(*standings, strict=True)
                standing = all(held), any(busy)
        if ranks.rank and not self.sharded:
            self.requests = []
        return standing

    # ----------------------------------------------------------------------------------------------------- capture

    def _save(self, standing: tuple[bool, bool] | None) -> None:
        """Capture the state for all requests and pass it to the writer; wait at most for the previous save."""
        start = time.perf_counter()
        requests, self.requests = self.requests, []
        wanted, writer = merged(requests), self._opened()
        held, busy = standing or self._standing(wanted)
        paths = list(dict.fromkeys(request.path for request in requests))
        # What the file has: the iteration or epoch that ends here counts.
        progress = self._run.state.counters.snapshot(self._run.state.progress.stage)
        if held and self._last is not None:
            paths = [path for path in paths if path not in self._names or path in writer.failed]
            if paths:
                writer.hand_over(SaveJob(wanted, paths, progress, source=self._last))
                self._names.update(paths)
        elif wanted.busy == "skip" and busy:
            writer.skip(SaveJob(wanted, paths, progress, given_up="another checkpoint is being written"))
        else:
            job = SaveJob(wanted, paths, progress, version=self._version())
            state = self._state(wanted.path, wanted.leave_out)
            if wanted.busy == "wait":
                self.wait()
            writer.replace(wanted.path)
            if self.sharded:
                state, job.parts = self._take_shards(state, wanted.path)
            # In a validation hooks may have swapped in averaged weights, which only a copy made now holds.
            beside = wanted.staging == "overlap" and progress.stage == "train"
            if beside and self.overlap is None:
                self.overlap = Overlap(map(stepping, self._run.optimizers.values()))
            job.staged = stage(state, self._buffer, overlap=self.overlap if beside else None)
            job.stall = time.perf_counter() - start
            writer.hand_over(job)
            self._last, self._names = job, set(paths)  # last: after Ctrl-C above, no file may hold this state

    def _standing(self, wanted: SaveRequest) -> tuple[bool, bool]:
        """Return whether the last file satisfies ``wanted`` for the current state, and whether the writer is busy."""
        last, writer = self._last, self._opened()
        held = (
            last is not None
            and last.version[0] == self._run.state.version  # the usual case is another one, and needs no look at the tensors
            and last.version == self._version()
            and last.request.path not in writer.failed
            and last.request.leave_out <= wanted.leave_out
        )
        return held, writer.busy

    def _version(self) -> tuple[int, ...]:
        """Return numbers that change when the state of the run does: tensor versions show changes between mount points."""
        version = self._run.state.version
        if self.sharded:  # a forward pass replaces the parameters, and so their versions
            return (version,)
        modules = chain.from_iterable(model.modules() for model in self._run.models.values())
        # Tensors made in inference mode have no version.
        return version, sum([version_of(tensor) for tensor in tensors_of(modules) if not tensor.is_inference()])

    def _state(self, path: AnyPath | str, leave_out: Collection[str] = ()) -> dict[str, Any]:
        """Return the state of the run by reference, with the keys of hooks and without ``leave_out``."""
        run = self._run
        counters = run.state.counters
        self.resumes_training_at = copy.copy(counters) if counters.phase == "train" else None
        state = gather_state(run, gather_rank(run, self.feeds), self._ranks_saved, leave_out)
        run.publish(ev.BeforeSaveCheckpoint, path=str(path), checkpoint=state)
        for key in leave_out:
            state.pop(key, None)
            forget_options(state.get("options", {}), key)
        return state

    def _take_shards(self, state: dict[str, Any], path: Any) -> tuple[dict[str, Any], Any]:
        from eventloop.checkpoint.sharded import take_shards  # takes a second; only for sharded models

        group = None if self.ranks is None else own_group("saves")
        return take_shards(state, path, self._token or secrets.token_hex(4), group)
