"""The checkpoints of torchtitan's ``CheckpointManager``, with the state of a bus in them, and others with names of hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager

from trainbus.bridges.hosted import TrainerHost
from trainbus.bridges.saves import TrainerSaver, Writing
from trainbus.bridges.torchtitan import privates
from trainbus.bridges.torchtitan.rates import Rates
from trainbus.bridges.torchtitan.state import KEY, SplitEntry, restored, wanted
from trainbus.eventloop.checkpoint import (
    FORMER_PREFIX,
    STATE_FILE,
    TEMPORARY_PREFIX,
    AnyPath,
    as_path,
    commit_folder,
    discard_folder,
    remove_leftover,
)
from trainbus.eventloop.errors import CheckpointError, ConfigurationError
from trainbus.eventloop.training.saves.contents import gather_entry
from trainbus.eventloop.training.saves.requests import SaveRequest
from trainbus.eventloop.user_errors import text_of
from trainbus.eventloop.world import this_rank

Method = Callable[..., Any]
T = TypeVar("T")

_METADATA = ".metadata"
"""The file that DCP writes last into a checkpoint."""


class TitanCheckpoints:
    """Add the state of a run to what a ``CheckpointManager`` saves, and take it back from what it loads."""

    def __init__(self, manager: CheckpointManager, rates: Rates) -> None:
        self._manager: Any = manager
        self._rates = rates
        self._save: Method = self._manager.dcp_save
        self._load: Method = self._manager.dcp_load
        self._loaded: tuple[str, Any] | None = None

    # -------------------------------------------------------------------------------------------------------- save

    def save(
        self, host: TrainerHost, state_dict: dict[str, Any], checkpoint_id: str, async_mode: Any, *args: Any, **options: Any
    ) -> Any:
        """Replace ``dcp_save`` of the manager: one of its own saves."""
        filled, writing = self._filled(host, state_dict, checkpoint_id), host.saver.writing(as_path(checkpoint_id))
        return _written(writing, async_mode, lambda: self._save(filled, checkpoint_id, async_mode, *args, **options))

    def write(self, host: TrainerHost, path: AnyPath) -> None:
        """Save a checkpoint that hooks have requested. It gets its name when it is complete and durable."""
        if not isinstance(path, Path):
            raise CheckpointError(f"cannot write {path}: in torchtitan, hooks save to local directories only")
        manager, first = self._manager, host.run.rank == 0
        temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}"
        manager.maybe_wait_for_saving()
        filled = self._filled(host, privates.states(manager), str(path))
        writing = host.saver.writing(path)

        mode = AsyncMode.DISABLED if manager.async_mode is AsyncMode.DISABLED else AsyncMode.ASYNC

        def prepare() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftover(temporary)
            temporary.mkdir()
            (temporary / STATE_FILE).write_bytes(filled[KEY]["rank_0"])  # also tells that the folder is ours

        def save() -> Any:
            _from_first(prepare)
            return self._save(filled, str(temporary), mode)

        def end(error: Exception | None) -> None:
            if first:
                commit_folder(temporary, path) if error is None else discard_folder(temporary)

        pending = _written(writing, mode, save, end)
        if mode is not AsyncMode.DISABLED:
            manager.save_future = pending

    def _filled(self, host: TrainerHost, state: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return what is saved, with the state of the bus, and weights that hooks replace."""
        entry, weights = host.gather_entry(path)
        replaced = {name: tensor for tensors in weights.values() for name, tensor in tensors.items() if name in state}
        filled = {**state, **{name: tensor.to(state[name].dtype) for name, tensor in replaced.items()}}
        if privates.TRAIN_STATE in state:  # else it is the model alone, at the end of a training
            filled[KEY] = entry.stored(host.run.rank, rates=self._rates.factors)
        return filled

    # -------------------------------------------------------------------------------------------------------- load

    def load(self, host: TrainerHost, original: Method, step: int = -1) -> tuple[bool, tuple[str, Any] | None]:
        """Replace ``load`` of the manager: also find checkpoints that hooks have requested.

        Return whether one was loaded, and its path and the state of the bus in it, if it is not one of the model alone.
        """
        self._loaded = None
        newest = _from_first(lambda: self._newest(host) if step == -1 else None)
        if newest is None:
            return original(step), self._loaded
        with torch.no_grad():
            self.dcp_load(host, privates.states_to_load(self._manager), newest, from_hf=False, from_quantized=False)
        return True, self._loaded

    def dcp_load(
        self, host: TrainerHost, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Replace ``dcp_load`` of the manager."""
        whole = privates.TRAIN_STATE in state_dict
        if whole and not from_hf:
            own, _ = host.gather_entry("")
            entry = wanted(privates.saved_in(checkpoint_id), host.run.rank, own.sharded)
            if entry is not None:
                state_dict[KEY] = entry
        self._load(state_dict, checkpoint_id, from_hf, from_quantized)
        if whole:
            filled = state_dict.pop(KEY, None)
            saved = None if filled is None else restored(filled)
            if saved is not None:
                self._rates.restore(saved["rates"])
            self._loaded = checkpoint_id, None if saved is None else saved["entry"]

    def _newest(self, host: TrainerHost) -> str | None:
        """Return the newest checkpoint, if it is one of hooks; None if it is one of the manager."""
        folders = {Path(one) for one in host.run.checkpointer.directories if isinstance(one, Path)}
        found = [one for folder in folders for one in folder.glob(f"*/{_METADATA}") if _is_checkpoint(one.parent)]
        own = [*Path(self._manager.folder).glob(f"step-*/{_METADATA}")] if "://" not in str(self._manager.folder) else []
        newest = max([*own, *found], key=lambda path: path.stat().st_mtime_ns, default=None)
        return str(newest.parent) if newest in found and newest is not None else None


def _is_checkpoint(folder: Path) -> bool:
    return (folder / STATE_FILE).is_file() and not folder.name.startswith((TEMPORARY_PREFIX, FORMER_PREFIX))


def _written(
    writing: Writing, mode: Any, save: Callable[[], Any], end: Callable[[Exception | None], object] = lambda error: None
) -> Any:
    """Make a save; report it when it is complete, after ``end``; return what ``dcp_save`` returns."""

    def finish(written: Callable[[], T]) -> T:
        with writing:
            try:
                result = written()
            except Exception as error:
                end(error)
                raise
            end(None)
            return result

    if mode is AsyncMode.DISABLED:
        return finish(save)
    try:
        with writing.copying():
            result = save()
    except Exception as error:  # noqa: BLE001 - raised by finish()
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return finish(failed.result)
    pending, complete = getattr(result, "upload_completion", result), Future[Any]()

    def tell(done: Future[Any]) -> None:
        try:
            complete.set_result(finish(done.result))
        except Exception as error:  # noqa: BLE001 - raised where the manager waits for the save
            complete.set_exception(error)

    pending.add_done_callback(tell)
    if pending is result:
        return complete
    result.upload_completion = complete
    return result


def _from_first(call: Callable[[], T]) -> T:
    """Return on all ranks what a call returns on the first one; raise its error on all.

    Raises:
        CheckpointError: on the other ranks, if it failed.
    """
    found: list[Any] = [None]
    failure: Exception | None = None
    try:
        found = [(call(), "")] if this_rank() == 0 else [None]
    except Exception as error:  # noqa: BLE001 - raised below, on all ranks
        found, failure = [(None, text_of(error))], error
    distributed.broadcast_object_list(found)
    result: T
    result, problem = found[0]
    if failure is not None:
        raise failure
    if problem:
        raise CheckpointError(f"the first rank could not save or load: {problem}")
    return result


class TitanSaver(TrainerSaver):
    """The saver of a run in a torchtitan ``Trainer``."""

    def __init__(self, host: TrainerHost, *, enabled: bool) -> None:
        super().__init__(host)
        self._enabled = enabled

    def check(self, request: SaveRequest) -> None:
        """Raise ConfigurationError also if the ``CheckpointManager`` is switched off."""
        super().check(request)
        if not self._enabled:
            raise ConfigurationError(
                "torchtitan saves nothing with checkpoint.enable=False, so no hook can save: set checkpoint.enable=True "
                "(with checkpoint.load_only=True, only hooks save)"
            )

    def rehearse(self, request: SaveRequest) -> list[str]:
        """Gather the state of the hooks; not the weights, for which ranks wait for each other, and this is for the first."""
        SplitEntry(gather_entry(self._run))
        return []
