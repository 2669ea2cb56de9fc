"""Checkpoint folders of a ``transformers.Trainer``: the state that the bus adds, and folders with names given by hooks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from trainbus.bridges.hosted import Weights
from trainbus.bridges.transformers import privates
from trainbus.convert import verify_folder
from trainbus.eventloop.checkpoint import (
    FORMER_PREFIX,
    STATE_FILE,
    TEMPORARY_PREFIX,
    AnyPath,
    commit_folder,
    discard_folder,
    is_folder,
    remove_leftover,
    sync_folder,
)
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.user_errors import contextmanager

log = get_logger()

_PREFIX: Final = "checkpoint"
_STATE: Final = "trainer_state.json"
_READ: Final = ("*.safetensors", "*model*.bin", "optimizer.bin", "*.index.json", "*.pt", "*.pth", _STATE)
"""The files that a resumed training reads. It has its configuration, arguments and tokenizer already."""
_WEIGHTS: Final = ("*model*.safetensors", "*model*.bin")


class Folders:
    """Add the state of the bus to the folders that a trainer writes.

    The trainer writes into ``output_dir/checkpoint-<step>``. For a folder with another name, it gets another ``output_dir``,
    and the complete folder is renamed.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._filling: tuple[Mapping[str, Any], Weights] | None = None
        self.writing: Path | None = None  # the directory in which the trainer writes a folder that gets another name, or None
        self.best: str | None = None  # the best folder of the trainer at its last save

    def next(self, trial: Any = None) -> Path:
        """Return the folder that the trainer would write next."""
        return Path(getattr(self._trainer, privates.OUTPUT_DIR)(trial)) / f"{_PREFIX}-{self._trainer.state.global_step}"

    def newest(self) -> str | None:
        """Return the folder in the trainer's ``output_dir`` that has the most steps, and is complete; None without any.

        Raises:
            CheckpointDamagedError: there are folders, but all are damaged.
        """
        found = []
        for folder in Path(self._trainer.args.output_dir).glob("*/"):
            if folder.name.startswith((TEMPORARY_PREFIX, FORMER_PREFIX)) or not (
                folder.name.startswith(f"{_PREFIX}-") or is_folder(folder)
            ):
                continue
            state = folder / _STATE
            try:
                steps = int(json.loads(state.read_bytes())["global_step"])
            except (OSError, ValueError, LookupError, TypeError) as error:  # such as after a kill during the save
                log.warning(
                    f"a checkpoint without a readable {_STATE} is skipped",
                    id="transformers-checkpoint-unreadable",
                    path=str(folder),
                    error=repr(error),
                )
                continue
            found.append((steps, state.stat().st_mtime, folder))
        damage: list[str] = []
        for *_, folder in sorted(found, reverse=True):
            try:
                check_folder(folder)
            except CheckpointDamagedError as error:
                log.warning(
                    "a damaged checkpoint is skipped; trying the previous one",
                    id="transformers-checkpoint-damaged",
                    path=str(folder),
                    error=str(error),
                )
                damage.append(str(error))
                continue
            if damage:
                log.warning(
                    "the training resumes from an earlier checkpoint", id="transformers-earlier-checkpoint", path=str(folder)
                )
            return str(folder)
        if damage:
            raise CheckpointDamagedError(f"no good checkpoint in {self._trainer.args.output_dir}: {'; '.join(damage)}")
        return None

    @contextmanager
    def filled(self, entry: Mapping[str, Any], weights: Weights) -> Iterator[None]:
        """Add the entry and the weights of the bus to the folder that the trainer writes in a block."""
        self._filling = entry, weights
        try:
            yield
        finally:
            self._filling = None

    def save_model(self, original: Callable[..., Any], output_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Replace the trainer's ``save_model``, its first step of a checkpoint, before it removes older ones."""
        if self._filling is None:
            original(output_dir, *args, **kwargs)
            return
        entry, weights = self._filling
        with _holding(self._trainer.model, weights.get("model", {})):
            original(output_dir, *args, **kwargs)
        if self._trainer.args.should_save:
            torch.save(entry, Path(output_dir) / STATE_FILE)

    def sync(self, folder: Path) -> None:
        """Make a folder that the trainer has written durable."""
        if self._trainer.args.should_save:
            sync_folder(folder)

    def write(self, path: AnyPath) -> None:
        """Make the trainer write a folder. It gets its name when it is complete and durable."""
        trainer, path = self._trainer, local(path)
        try:
            with self.redirected(path) as written:
                privates.save(trainer)
            if trainer.args.should_save:
                commit_folder(written, path)
        finally:
            if trainer.args.should_save:
                discard_folder(self.temporary(path))

    def temporary(self, path: Path) -> Path:
        """Return the directory in which the trainer writes a folder: the same on all ranks, which each write a file."""
        return path.parent / f"{TEMPORARY_PREFIX}{path.name}"

    @contextmanager
    def redirected(self, path: Path, best: Path | None = None) -> Iterator[Path]:
        """Make the trainer write into another folder in a block, without removing older checkpoints; yield the folder.

        Its name is ``path`` when it is complete; ``best`` is the same if :attr:`best` may name it then.
        """
        trainer, first, state = self._trainer, self._trainer.args.should_save, self._trainer.state
        directory, former = self.temporary(path), state.best_model_checkpoint
        if first:
            remove_leftover(directory)
        trainer.accelerator.wait_for_everyone()
        self.writing = directory
        try:
            yield (written := self.next())
            # The trainer looks for its best folder beside this one.
            self.best = state.best_model_checkpoint = former if best is None else self._best(best, former)
            if first and state.best_model_checkpoint is not None:
                state.save_to_json(str(written / _STATE))
            trainer.accelerator.wait_for_everyone()
        finally:
            self.writing, state.best_model_checkpoint = None, former

    def _best(self, path: Path, former: str | None) -> str | None:
        """Return the best folder of the trainer, by its own rule."""
        args, step = self._trainer.args, self._trainer.state.best_global_step
        if args.save_strategy in ("steps", "epoch", "best") and step:
            best = path.with_name(f"{_PREFIX}-{step}")
            if best == path or best.exists():
                return str(best)
        return former


def local(path: AnyPath) -> Path:
    """Return a local path; raise CheckpointError for a URL."""
    if not isinstance(path, Path):
        raise CheckpointError(f"cannot write {path}: a transformers.Trainer writes checkpoints to local directories only")
    return path


def check_folder(folder: Path) -> None:
    """Compare the files of a folder that a resumed training reads with their digests; warn of other changes.

    The trainer decides whether it needs a file that is missing: it begins with a new optimizer if there is none, and finds
    weights that were split anew.

    Raises:
        CheckpointDamagedError: files have changed, or there are no weights any more.
    """
    missing, changed = verify_folder(folder, _READ)
    if missing and not any(any(folder.rglob(pattern)) for pattern in _WEIGHTS):
        raise CheckpointDamagedError(f"{folder} is damaged: {', '.join(missing)} is missing; resume from another checkpoint")
    if missing:
        log.warning(
            "files of the checkpoint are missing; the trainer resumes without them",
            id="transformers-files-missing",
            path=str(folder),
            files=missing,
        )
    if changed:
        log.warning(
            "files of the checkpoint have changed; a resume does not read them",
            id="transformers-files-changed",
            path=str(folder),
            files=changed,
        )


def read_entry(folder: Path) -> Mapping[str, Any] | None:
    """Return the state of the bus in a folder; None if it has none."""
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        entry: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; remove it to resume without the state of the bus") from error
    return entry


@contextmanager
def _holding(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace tensors of the model in a block, without a copy."""
    named = model.state_dict(keep_vars=True)
    raw: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        for name, tensor in tensors.items():
            own = named[name]
            raw.setdefault(id(own), (own, own.data))  # a tied tensor has several names
            own.data = tensor.to(own.data)
        yield
    finally:
        for own, data in raw.values():
            own.data = data
