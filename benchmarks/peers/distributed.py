"""torch.distributed.checkpoint in a process group of one: at once, on a thread, in a process; staged anew or in kept memory."""

import os
import resource
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.peers import Resume, Saver, Trained

SPARE_FILES = 1000


@contextmanager
def at_once(model: nn.Module, work_dir: Path) -> Iterator[Saver]:
    weights = model.state_dict()
    with group():
        yield Saver(lambda path: dcp.save(weights, checkpoint_id=path), partial(read, weights))


@contextmanager
def in_background(kind: AsyncCheckpointerType, kept: bool, model: nn.Module, work_dir: Path) -> Iterator[Saver]:
    weights = model.state_dict()
    shared = kind is AsyncCheckpointerType.PROCESS
    options = {"async_checkpointer_type": kind}
    pending: list[Any] = []

    def save(path: Path) -> None:
        pending.append(dcp.async_save(weights, checkpoint_id=path, **options))

    def settle() -> None:
        while pending:
            pending.pop().result()

    with ExitStack() as scopes:
        scopes.enter_context(group())
        if shared:
            need_files(len(weights))
            with hushed():
                dcp.async_save({"nothing": torch.zeros(1)}, checkpoint_id=work_dir / "first", **options).result()
        if kept:
            # Without a CUDA device it can neither pin memory nor stage on a separate thread.
            options["async_stager"] = scopes.enter_context(kept_stager(StagingOptions(False, shared, False, False)))
        yield Saver(save, partial(read, weights), settle, background=True)


@contextmanager
def of_training(
    pinned: bool, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Callable[[Any, Path], None], Callable[[], None]]]:
    """Save asynchronously; with ``pinned`` on a stream of its own into kept pinned memory, and the next step waits for that."""
    staging: list[Any] = []
    uploads: list[Any] = []

    def save(state: Mapping[str, Any], path: Path) -> None:
        response = dcp.async_save(state, checkpoint_id=path, **options)
        staging.extend([response.staging_completion] if pinned else [])
        uploads.append(response.upload_completion if pinned else response)

    def wait_for_copy(*_: object) -> None:
        while staging:
            staging.pop().result()

    def settle() -> None:
        while uploads:
            uploads.pop().result()

    with ExitStack() as scopes:
        scopes.enter_context(group())
        options = {"async_stager": scopes.enter_context(kept_stager(StagingOptions()))} if pinned else {}
        scopes.callback(optimizer.register_step_pre_hook(wait_for_copy).remove)
        yield save, settle


@contextmanager
def kept_stager(options: StagingOptions) -> Iterator[DefaultStager]:
    """A stager that keeps its memory.

    Raises:
        OSError: it works once only, as that of torch 2.11.
    """
    with closing(DefaultStager(options)) as stager:
        for _ in range(2):
            try:
                staged: Any = stager.stage({"nothing": torch.zeros(1)})
                if options.use_async_staging:
                    staged.result()
            except KeyError as error:
                raise OSError(f"the stager of torch {torch.__version__} works once only") from error
        yield stager


def weights_of(name: str, path: Path) -> Tensor:
    """Load one tensor of a saved model."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata[f"model.{name}"]
    state = {"model": {name: torch.empty(metadata.size)}}
    dcp.load(state, checkpoint_id=path)
    return state["model"][name]


def read(weights: Mapping[str, Tensor], path: Path | str, reader: Any = None) -> Iterable[Tensor]:
    loaded = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    dcp.load(loaded, checkpoint_id=path, storage_reader=reader)
    return loaded.values()


@contextmanager
def in_store(
    save: Callable[..., Any], writer: Callable[[str], Any], reader: Callable[[str], Any], model: nn.Module, _: str
) -> Iterator[Saver]:
    """Save by ``dcp.save`` or ``dcp.async_save`` with the reader and writer of a store."""
    weights = model.state_dict()
    pending: list[Any] = []

    def begin(url: str) -> None:
        pending.append(save(weights, storage_writer=writer(url)))

    def settle() -> None:
        if save is dcp.async_save:
            pending.pop().result()

    def load(url: str) -> Iterable[Tensor]:
        return read(weights, url, reader(url))

    with group():
        yield Saver(begin, load, settle, background=save is dcp.async_save)


@contextmanager
def group() -> Iterator[None]:
    """Create the process group that saving from another process needs, once, and keep it for that process."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def need_files(tensors: int) -> None:
    """Raise the limit of open files, because shared memory needs one for each tensor.

    Raises:
        OSError: the limit cannot be raised so far.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < tensors + SPARE_FILES:
        raise OSError(f"it needs an open file for each of {tensors:,} tensors, but this user's limit is {hard:,}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def hushed() -> Iterator[None]:
    """Silence the process that the first save starts: it logs every later save to the terminal that it inherits."""
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def save_both(trained: Trained, path: Path) -> None:
    with group():
        weights, state = get_state_dict(*trained)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def resume(trained: Trained, path: Path) -> None:
    with group():
        weights, state = get_state_dict(*trained)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(*trained, model_state_dict=weights, optim_state_dict=state)


RESUMES = {"DCP": Resume(save_both, resume)}
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
SAVERS = {
    "DCP": at_once,
    "DCP async, thread": partial(in_background, THREAD, False),
    "DCP async, thread, cached": partial(in_background, THREAD, True),
    "DCP async, process": partial(in_background, PROCESS, False),
    "DCP async, process, cached": partial(in_background, PROCESS, True),
}
STORES = {
    "DCP, fsspec": partial(in_store, dcp.save, FsspecWriter, FsspecReader),
    "DCP async, fsspec": partial(in_store, dcp.async_save, FsspecWriter, FsspecReader),
}
