"""Folders of DCP that get their names when they are complete, checked and durable; DCP itself writes files in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpoint import AsyncMode

from trainbus.convert.dcp import check_dcp, is_dcp
from trainbus.convert.safetensors_folder import open_safetensors
from trainbus.eventloop.checkpoint import (
    TEMPORARY_PREFIX,
    Together,
    commit_folder,
    discard_folder,
    files_in,
    remove_leftover,
)
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.user_errors import described
from trainbus.eventloop.world import world_size

T = TypeVar("T")

# torchtitan takes each name with "step-N" in it for a checkpoint, when it resumes and when it removes old ones.
_TEMPORARY: Final = f"{TEMPORARY_PREFIX}saving.tmp"
_KINDS: Final = (".metadata", ".distcp", ".safetensors", ".safetensors.index.json")
"""How the names of files end that a checkpoint of torchtitan has."""


class FolderWriter:
    """Writes checkpoints as folders. All ranks call it, in one order, and see one file system."""

    @cached_property
    def ranks(self) -> Together:
        """All ranks, in a group of their own: a save may be committed while the training uses the default one."""
        return Together(distributed.new_group(backend="gloo") if world_size() > 1 else None)

    def write(
        self,
        path: Path,
        mode: AsyncMode,
        save: Callable[[str], Any],
        *,
        files: Mapping[str, bytes] | None = None,
        replace: bool = False,
    ) -> Any:
        """Have ``save`` make a folder under a temporary name, then rename it to ``path``.

        Args:
            path: the final name.
            mode: how the folder is written.
            save: calls DCP with the temporary name. It returns what ``dcp_save`` of a ``CheckpointManager`` returns.
            files: further files by name. The first rank writes them.
            replace: whether a folder with that name is replaced if it has no state of a bus.

        Returns:
            What ``save`` returned, with a future that is done when the folder has its name.

        Raises:
            CheckpointError: a rank failed.
        """
        temporary, what, ranks = path.parent / _TEMPORARY, f"cannot write {path}", self.ranks

        def prepare() -> None:
            if ranks.first:
                temporary.parent.mkdir(parents=True, exist_ok=True)
                remove_leftover(temporary)
                temporary.mkdir()
                for name, content in (files or {}).items():
                    (temporary / name).write_bytes(content)

        def commit() -> None:
            if ranks.first:
                check_folder(temporary)
                known = [name for name in files_in(path) if name.endswith(_KINDS)]
                commit_folder(temporary, path, replace=replace, known=known)

        def finish(written: Callable[[], T]) -> T:
            try:
                result = written()  # on the first rank, it returns when all ranks have written
                ranks.do(what, commit)
            except Exception:
                if ranks.first:
                    discard_folder(temporary)
                raise
            return result

        ranks.do(what, prepare)
        return when_written(mode, partial(save, str(temporary)), finish)

    def remove_leftovers(self, folder: Path) -> None:
        """Remove what a killed process has left in a folder of checkpoints."""
        if self.ranks.first:
            for left in folder.glob(f"{TEMPORARY_PREFIX}*.tmp"):
                remove_leftover(left)


def check_folder(folder: Path) -> None:
    """Raise CheckpointError if the folder's reader would refuse it: DCP's, or that of Hugging Face's format."""
    if is_dcp(folder):
        check_dcp(folder)
    else:
        open_safetensors(folder)


def when_written(mode: AsyncMode, save: Callable[[], Any], finish: Callable[[Callable[[], Any]], Any]) -> Any:
    """Make a save; when it is written, call ``finish`` with a function that returns its result or raises its error.

    Return what ``save`` returns, with a future that has the result or the error of ``finish``. That runs on the thread that
    has written the save.
    """
    if mode is AsyncMode.DISABLED:
        return finish(partial(_result_of, save))
    try:
        result = save()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - raised by finish()
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return finish(partial(_result_of, failed.result))
    pending, complete = getattr(result, "upload_completion", result), Future[Any]()

    def tell(done: Future[Any]) -> None:
        try:
            complete.set_result(finish(partial(_result_of, done.result)))
        except BaseException as error:  # noqa: BLE001 - raised where the manager waits for the save
            complete.set_exception(error)

    pending.add_done_callback(tell)
    return complete if pending is result else AsyncSaveResponse(result.staging_completion, complete)


def _result_of(call: Callable[[], T]) -> T:
    try:
        return call()
    except CheckpointException as error:  # DCP derives it from BaseException
        problems = (f"rank {rank}: {described(failure)}" for rank, (failure, _) in error.failures.items())
        raise CheckpointError(f"DCP could not save: {'; '.join(problems)}") from error
