"""Two processes with FSDP2: each has, and saves, a part of every weight."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eventloop import CheckpointDamagedError, ConfigurationError, Hook
from eventloop.checkpoint import export_weights, load, load_whole, sweep_shards
from eventloop.checkpoint.shards import verify_shards
from hooks import CheckpointHook

from . import jobs


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }


def train(work_dir: str, epochs: int, resume: str | None, shard: bool = True) -> Any:
    hook = CheckpointHook(interval=1, max_keep_ckpts=2, save_best="loss")
    loop = jobs.make_loop(work_dir, hook, epochs=epochs, shard=shard)
    loop.run(resume=resume)
    return whole(loop.model)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(other[name], value)


def test_training_equals_the_single_process_and_resumes_on_2_1_and_2_processes(ranks, tmp_path):
    (single,) = ranks(train, str(tmp_path / "single"), 4, None, False, size=1)
    place = tmp_path / "sharded"
    ranks(train, str(place), 2, None)
    state = load(place / "epoch_2.safetensors")
    directory = place / state["shards"]
    assert {file.name for file in directory.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    (third,) = ranks(train, str(place), 3, "auto", False, size=1)  # one that shards nothing
    assert third.keys() == single.keys()
    assert load_whole(place / "epoch_2.safetensors")["state_dict"]["0.weight"].shape == (16, 4)
    export_weights(place / "epoch_2.safetensors", tmp_path / "weights.safetensors")
    assert load_file(tmp_path / "weights.safetensors")["0.weight"].shape == (16, 4)
    for resumed in ranks(train, str(place), 4, "auto"):
        same(single, resumed)


def test_files_and_their_directories_come_and_go_together(ranks, tmp_path):
    ranks(train, str(tmp_path), 4, None)
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    assert {"epoch_3.safetensors", "epoch_4.safetensors"} <= files
    named = {load(tmp_path / name)["shards"] for name in files}
    assert {one.name for one in tmp_path.glob("*.shards")} == named
    assert (tmp_path / "last_checkpoint").read_text() == "epoch_4.safetensors"
    directory = tmp_path / load(tmp_path / "epoch_4.safetensors")["shards"]
    part = directory / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="other bytes"):
        verify_shards(load(tmp_path / "epoch_4.safetensors"), tmp_path / "epoch_4.safetensors")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    sweep_shards(tmp_path, still=0)
    assert not list(tmp_path.glob("*.shards"))


class DiesInASave(Hook):
    """As a machine that goes away: rank 1 is gone before its part is written."""

    def before_save_checkpoint(self, event: Any) -> None:
        if event.run.rank == 1 and event.progress.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def dies(work_dir: str) -> None:
    jobs.make_loop(work_dir, CheckpointHook(interval=1), DiesInASave(), epochs=4, shard=True).run()


def test_a_save_that_one_process_does_not_finish_is_no_checkpoint_and_the_one_before_resumes(outcomes, ranks, tmp_path):
    first, second = outcomes(dies, str(tmp_path))
    assert second.exitcode == -signal.SIGKILL
    assert first.exitcode == 1, first.output
    assert (tmp_path / "last_checkpoint").read_text() == "epoch_2.safetensors"
    assert not Path(tmp_path, "epoch_3.safetensors").exists()
    assert len(ranks(train, str(tmp_path), 4, "auto")) == 2


def refused(options: dict[str, Any]) -> str:
    loop = jobs.make_loop("nowhere", CheckpointHook(interval=1, **options), shard=True)
    with pytest.raises(ConfigurationError) as caught:
        loop.run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"staging": "overlap"}, 'leave it at "block"'),
        ({"busy": "replace"}, 'take busy="wait" or "skip"'),
        ({"out_dir": "memory://bucket"}, "a directory that all processes share"),
    ],
)
def test_options_that_need_one_writer_are_refused_with_the_way_out(ranks, options, way_out):
    for message in ranks(refused, options):
        assert "sharded" in message
        assert way_out in message
