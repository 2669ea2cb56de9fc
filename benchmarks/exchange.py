"""Checkpoints from and to folders of torch.distributed.checkpoint, beside what torch has for that; one process.

The model has 10 M parameters in 100 layers, with AdamW: 120 MB. Torch's ways hold all of it in memory, and torch.save does not
sync its file to the disk.
"""

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.harness import SUBJECT, Comparison, Sample, Settings, measure
from trainbus.convert import convert_folder, copy_in, open_contents, open_folder, save_contents, to_dcp
from trainbus.convert.dcp_write import write_dcp
from trainbus.eventloop.checkpoint import save
from trainbus.eventloop.training import imported_state

LAYERS, WIDTH = 100, 316
THEIRS_OUT, THEIRS_IN = "torch.load, dcp.save", "dcp_to_torch_save"
SHARDED = "trainbus, sharded"


def run(settings: Settings) -> list[Comparison]:
    warnings.simplefilter("ignore")  # there is one process
    with tempfile.TemporaryDirectory(prefix="trainbus-exchange-") as name:
        folder = Path(name)
        size = make(folder, layers=4 if settings.quick else LAYERS)
        ways = (
            {SUBJECT: export_ours, THEIRS_OUT: export_theirs},
            {SUBJECT: import_ours, SHARDED: sharded, THEIRS_IN: import_theirs},
        )
        samples = [
            measure({name: timed(folder, way) for name, way in one.items()}, settings.rounds(quick=2, full=7), settings.tick)
            for one in ways
        ]
    what = f"{size / 1e6:.0f} MB with AdamW"
    return [
        Comparison(f"A checkpoint becomes a DCP folder, {what}", "ms", THEIRS_OUT, samples[0]),
        Comparison(f"A DCP folder becomes a checkpoint, {what}", "ms", THEIRS_IN, samples[1]),
    ]


def make(folder: Path, layers: int) -> int:
    """Write one state as a checkpoint, as a file of torch.save, and as a folder of DCP; return its size in bytes."""
    weights = {f"layers.{index}.weight": torch.randn(WIDTH, WIDTH) for index in range(layers)}
    names = list(weights)
    state = {
        index: {"step": torch.tensor(1.0), "exp_avg": torch.randn(WIDTH, WIDTH), "exp_avg_sq": torch.rand(WIDTH, WIDTH)}
        for index in range(layers)
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "params": [*range(layers)]}]
    run = imported_state(weights, iter=1) | {"parameters": {"optimizer": "\n".join(names)}}
    written = save(run | {"optimizer": {"optimizer": {"state": state, "param_groups": groups}}}, folder / "ours.safetensors")
    named = {"state": {names[index]: one for index, one in state.items()}, "param_groups": [{**groups[0], "params": names}]}
    tree = {"model": weights, "optimizer": named}
    torch.save(tree, folder / "theirs.pt")
    dcp.save(tree, checkpoint_id=folder / "theirs", no_dist=True)
    return written.bytes


def timed(folder: Path, way: Callable[[Path, Path], None]) -> Sample:
    def sample() -> float:
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        start = time.perf_counter()
        way(folder, out)
        return time.perf_counter() - start

    return sample


def export_ours(folder: Path, out: Path) -> None:
    contents = open_contents(folder / "ours.safetensors")
    write_dcp(to_dcp(contents.tree), contents, out / "new")


def export_theirs(folder: Path, out: Path) -> None:
    dcp.save(torch.load(folder / "theirs.pt", weights_only=True), checkpoint_id=out / "new", no_dist=True)


def import_ours(folder: Path, out: Path) -> None:
    contents = open_folder(folder / "theirs")
    contents.tree, _ = convert_folder(contents.tree)
    save_contents(contents, out / "new.safetensors")


def sharded(folder: Path, out: Path) -> None:
    with copy_in.ONE_FILE.replaced(0):  # as for a larger one
        import_ours(folder, out)


def import_theirs(folder: Path, out: Path) -> None:
    dcp_to_torch_save(folder / "theirs", out / "new.pt")
