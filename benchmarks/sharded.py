"""Saves of state that is spread over processes: stall, time until durable, and reading it back, beside DCP.

By FSDP2 over two processes, and by tensor parallelism and FSDP2 over four. All processes save at once; times are those of
rank 0, from a barrier on. Files are in the folder of temporary files.
"""

import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, multiprocessing, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.harness import Budget, Comparison, Samples, Settings, paused_gc
from trainbus.eventloop.checkpoint import Overlap, load, save
from trainbus.eventloop.checkpoint.sharded import ShardStage, put_shards

LAYOUTS = {"FSDP2": (2,), "tensor parallelism and FSDP2": (2, 2)}
"""The shapes of the meshes: copies or parts of data, and parts of a layer."""
TOKEN = "00000000"  # noqa: S105 - no secret
COPY, WRITTEN = "one foreach copy", "written and synced"
STALL, DURABLE, READ = "stall", "durable", "read"

Save = Callable[[Path], Callable[[], object]]
"""Saves to a path; returns what waits until that is durable."""
Read = Callable[[Path], object]


def run(settings: Settings) -> list[Comparison]:
    comparisons = []
    for number, (layout, shape) in enumerate(LAYOUTS.items(), start=1):
        with tempfile.TemporaryDirectory(prefix="trainbus-sharded-") as folder:
            results = multiprocessing.get_context("spawn").SimpleQueue()
            multiprocessing.spawn(_process, (folder, shape, settings.quick, results), nprocs=math.prod(shape))
            parameters, samples = results.get()
        what = f"{parameters / 1e6:.0f} M parameters with AdamW, {math.prod(shape)} processes with {layout}"
        del samples[STALL][WRITTEN]  # which has the same copy as the other floor
        settings.tick(number, len(LAYOUTS))
        budget = Budget(6, 1.3) if len(shape) == 1 else None
        comparisons += [
            Comparison(f"Stall of a sharded save, {what}", "ms", COPY, samples[STALL], budget=budget),
            Comparison(f"Until a sharded save is durable, {what}", "ms", WRITTEN, samples[DURABLE]),
            Comparison(f"Reading a sharded save, {what}", "ms", "trainbus", samples[READ]),
        ]
    return comparisons


def _process(rank: int, folder: str, shape: tuple[int, ...], quick: bool, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder}/rendezvous"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=math.prod(shape))
    model, optimizer = make_job(64 if quick else 700, shape)
    samples: dict[str, Samples] = {STALL: {}, DURABLE: {}, READ: {}}
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with contenders(tree, optimizer) as saves:
        for number in range(2 if quick else 9):
            for name, (save_it, read) in saves.items():
                times = measured(Path(folder) / name.replace(" ", "_") / "a.safetensors", save_it, read)
                for kind, seconds in times.items() if number else ():  # the first round does not count
                    samples[kind].setdefault(name, []).append(seconds)
    if not rank:
        results.put((sum(one.numel() for one in model.parameters()), samples))
    distributed.destroy_process_group()


def make_job(width: int, shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of 60 layers and its optimizer, which has made a step."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(60)))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[: len(shape)])
    if len(shape) > 1:
        plan = {str(layer): RowwiseParallel() if layer % 2 else ColwiseParallel() for layer in range(60)}
        parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measured(path: Path, save_it: Save, read: Read | None) -> dict[str, float]:
    distributed.barrier()
    if not distributed.get_rank():
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        os.sync()
    distributed.barrier()
    with paused_gc():
        start = time.perf_counter()
        wait = save_it(path)
        times = {STALL: time.perf_counter() - start}
        if read is not None or wait is not _nothing:
            wait()
            times[DURABLE] = time.perf_counter() - start
        if read is not None:
            distributed.barrier()
            start = time.perf_counter()
            read(path)
            times[READ] = time.perf_counter() - start
    return times


def _nothing() -> None:
    """Nothing was written."""


def _done() -> None:
    """All is written already."""


@contextmanager
def contenders(tree: dict[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[dict[str, tuple[Save, Read | None]]]:
    parts = [one.to_local() for one in _tensors(tree)]
    kept = [torch.empty_like(part) for part in parts]
    stager = DefaultStager(StagingOptions(False, False, False, False))
    overlap = Overlap([optimizer])
    stages = ShardStage(), ShardStage()
    targets = {".".join(map(str, keys)): torch.empty_like(value) for keys, value in _walk(tree)}

    def copy(path: Path) -> Callable[[], object]:
        torch._foreach_copy_(kept, parts)
        return _nothing

    def plain(path: Path) -> Callable[[], object]:
        torch._foreach_copy_(kept, parts)

        def write() -> None:
            with path.with_name(f"{distributed.get_rank()}").open("wb", buffering=0) as file:
                for part in kept:
                    file.write(part.numpy())
                os.fsync(file.fileno())
            distributed.barrier()

        return write

    def ours(stage: ShardStage, overlap: Overlap | None) -> Save:
        def save_it(path: Path) -> Callable[[], object]:
            with torch.no_grad():
                rest, parts = stage.copy_parts(tree, path, TOKEN, distributed.group.WORLD, overlap=overlap)
            return lambda: parts.commit(path, lambda: save(rest, path).bytes)

        return save_it

    def read(path: Path) -> object:
        return put_shards(load(path), path, lambda keys, shape, dtype: targets[".".join(map(str, keys))])

    def at_once(path: Path) -> Callable[[], object]:
        dcp.save(tree, checkpoint_id=path.parent / "dcp")
        return _done

    def on_a_thread(**options: Any) -> Save:
        def save_it(path: Path) -> Callable[[], object]:
            options["async_checkpointer_type"] = AsyncCheckpointerType.THREAD
            return dcp.async_save(tree, checkpoint_id=path.parent / "dcp", **options).result

        return save_it

    def dcp_read(path: Path) -> object:
        return dcp.load(dict(targets), checkpoint_id=path.parent / "dcp")

    yield {
        COPY: (copy, None),
        WRITTEN: (plain, None),
        "trainbus": (ours(stages[0], None), read),
        "trainbus, overlap": (ours(stages[1], overlap), None),
        "DCP save": (at_once, dcp_read),
        "DCP async_save": (on_a_thread(), None),
        "DCP async_save, kept memory": (on_a_thread(async_stager=stager), None),
    }
    overlap.close()
    stager.close()


def _walk(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the sharded tensors of a tree with their keys."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _walk(value, (*keys, key))
    elif hasattr(tree, "to_local"):
        yield keys, tree


def _tensors(tree: Any) -> list[Any]:
    return [value for _, value in _walk(tree)]
