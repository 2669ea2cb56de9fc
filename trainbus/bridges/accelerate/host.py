"""``attach(bus, accelerator, checkpoints=True)``: the folders of ``accelerator.save_state()``, written beside the training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from trainbus.bridges.accelerate import privates
from trainbus.bridges.bridge import Bridge
from trainbus.bridges.saves import ReopenedSaver
from trainbus.convert import FolderFiles, verify_folder
from trainbus.convert.folder_files import DIGESTS_FILE
from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checkpoint import TEMPORARY_PREFIX, discard_folder, files_in, free_name, remove_leftover
from trainbus.eventloop.errors import CheckpointError, ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.platform import patiently
from trainbus.eventloop.user_errors import contextmanager

log = get_logger()

_NAMED: Final = re.compile(r"checkpoint_(\d+)")  # names of folders by automatic naming

_REFUSED: Final = {
    "FSDP": "FSDP writes its own shards, on all ranks",
    "DEEPSPEED": "DeepSpeed writes its own shards, on all ranks",
    "MEGATRON_LM": "Megatron-LM writes its own shards, on all ranks",
    "XLA": "a TPU writes through torch_xla",
}
"""Kinds of distributed training whose state cannot be copied on one rank, with the reason."""


class AcceleratorSaves(Bridge):
    """Make ``save_state()`` copy, and write on a thread; ``load_state()`` reads the folder, also without trainbus.

        attach(Bus(), accelerator, checkpoints=True)

    - A folder gets its name when it is complete and durable, and replaces a folder of that name.
    - With ``automatic_checkpoint_naming``, folders beyond ``total_limit`` are removed when their successor is durable.
    - If a save fails, the next ``save_state()``, ``load_state()`` or ``end_training()`` raises its error.
    - ``accelerator.end_training()`` waits for all folders; without it, the end of the process does.

    The events of a training come from ``Run(bus, accelerator=accelerator)``, whose state is in the folders, too.

    Args:
        bus: a bus; no events are published on it.
        accelerator: the accelerator.
        checkpoints: must be True.

    Raises:
        ConfigurationError: ``checkpoints`` is False, or the state is sharded.
    """

    host, trains = "an accelerate.Accelerator", "save_state"
    missing: ClassVar[Mapping[str, str]] = {}

    def __init__(self, bus: Bus, accelerator: Any, *, checkpoints: bool = False) -> None:
        privates.check(accelerator)
        super().__init__(bus, accelerator)
        if not checkpoints:
            raise ConfigurationError(
                "an Accelerator publishes no events: write your loop around Run(bus, accelerator=accelerator, ...); with "
                "checkpoints=True, attach() has its folders written beside the training"
            )
        kind, project = accelerator.distributed_type.name, accelerator.project_configuration
        reason = _REFUSED.get(kind) or ("save_on_each_node=True writes on several ranks" if project.save_on_each_node else None)
        if reason is not None:
            raise ConfigurationError(f"checkpoints=True does not work with this Accelerator: {reason}")
        self._saver = ReopenedSaver()

    def install(self) -> None:
        """Replace the methods of the accelerator."""
        self.on_detach(self._saver.close)
        for name, method in (("save_state", self._save), ("load_state", self._load), ("end_training", self._end)):
            self.replace(self.trainer, name, partial(method, getattr(self.trainer, name)))

    def _save(self, original: Callable[..., Any], output_dir: Any = None, *args: Any, **options: Any) -> Path:
        self._wait_for_files()
        accelerator = self.trainer
        automatic = accelerator.project_configuration.automatic_checkpoint_naming
        final = self._next() if automatic else Path(output_dir).expanduser()
        # Not among the folders of automatic naming: load_state() would take it for the newest one.
        temporary = (final.parent.parent if automatic else final.absolute().parent) / f"{TEMPORARY_PREFIX}{final.name}"
        files = FolderFiles(temporary)
        first = accelerator.is_main_process
        try:
            if first:
                final.parent.mkdir(parents=True, exist_ok=True)
                remove_leftover(temporary)
            accelerator.wait_for_everyone()
            with self._unnamed(), files.recorded() if first else nullcontext():
                original(str(temporary), *args, **options)
            accelerator.wait_for_everyone()  # each rank has written a file
            if first:
                _check_replaced(final, files)
                self._saver.save(files.tree, final, files.write)
                if automatic:
                    self._saver.after_commit(self._rotate)
        except BaseException:
            if first:
                discard_folder(temporary)
            raise
        return final

    def _load(self, original: Callable[..., Any], input_dir: Any = None, *args: Any, **options: Any) -> Any:
        self._wait_for_files()
        folder = self._newest() if input_dir is None else Path(input_dir).expanduser()
        if folder is not None and (missing := verify_folder(folder).missing):
            log.warning("files of the checkpoint are missing", id="accelerate-files-missing", path=str(folder), files=missing)
        return original(input_dir, *args, **options)

    def _end(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            self._saver.close()
        finally:
            original(*args, **options)

    def _next(self) -> Path:
        """Return the folder for the next save by automatic naming."""
        accelerator = self.trainer
        final = Path(accelerator.project_dir) / "checkpoints" / f"checkpoint_{accelerator.save_iteration}"
        if final.exists():
            raise ValueError(
                f"Checkpoint directory {final} ({accelerator.save_iteration}) already exists. Please manually override "
                "`self.save_iteration` with what iteration to start with."
            )
        return final

    def _newest(self) -> Path | None:
        """Return the folder that the accelerator loads by automatic naming, which is by the first number in its name."""
        if not self.trainer.project_configuration.automatic_checkpoint_naming:
            return None
        folders = (Path(self.trainer.project_dir) / "checkpoints").glob("*")
        return max(((int(found[0]), path) for path in folders if (found := re.search(r"\d+", path.name))), default=(0, None))[1]

    @contextmanager
    def _unnamed(self) -> Iterator[None]:
        """Make the accelerator write to the given folder in a block, and remove none."""
        project = self.trainer.project_configuration
        before, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
        try:
            yield
        finally:
            project.automatic_checkpoint_naming = before

    def _rotate(self) -> None:
        """Remove the oldest folders of automatic naming beyond the limit, as the accelerator does before a save."""
        limit = self.trainer.project_configuration.total_limit
        directory = Path(self.trainer.project_dir) / "checkpoints"
        numbered = [(int(found[1]), path) for path in directory.iterdir() if (found := _NAMED.fullmatch(path.name))]
        for _, path in sorted(numbered)[:-limit] if limit else ():
            aside = free_name(directory.parent / f"{TEMPORARY_PREFIX}{path.name}.old")
            patiently(path.rename, aside)
            discard_folder(aside)
            log.debug("removed an old checkpoint", path=str(path))

    def _wait_for_files(self) -> None:
        """Wait on all ranks until every folder is durable; raise the error of a save that failed."""
        try:
            self._saver.wait()
        finally:
            self.trainer.wait_for_everyone()


def _check_replaced(final: Path, files: FolderFiles) -> None:
    """Raise CheckpointError if a folder that would be replaced has files other than those of a checkpoint."""
    known = {*files.tree, DIGESTS_FILE, *files_in(files.folder)}
    if other := sorted(files_in(final) - known):
        raise CheckpointError(
            f"{final} holds other files than a checkpoint ({', '.join(other[:3])}): a save would remove them, so give "
            "accelerator.save_state() a separate folder"
        )
