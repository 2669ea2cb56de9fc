"""Bridges in two processes (gloo)."""

import pytest
import torch

from ..ranks.conftest import on_ranks
from . import jobs


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_stop_and_a_save_of_one_rank_take_effect_on_all(tmp_path, library):
    pytest.importorskip(library)
    if library == "lightning":
        outcomes = on_ranks(jobs.stops_in_lightning, tmp_path, folder=tmp_path)
    else:
        outcomes = on_ranks(jobs.stops_in_transformers, tmp_path, folder=tmp_path)
    assert [one.exitcode for one in outcomes] == [0, 0], [one.output for one in outcomes]
    (steps, reason, committed), (others, reason_there, _) = (one.value for one in outcomes)
    assert steps == others
    assert 6 <= steps <= 8
    assert reason == reason_there == "enough"
    assert f"iter_{steps}" in [name.removesuffix(".ckpt") for name in committed]


def test_lightning_ddp(tmp_path):
    pytest.importorskip("lightning")
    (rank, plain, *_), _ = (one.value for one in on_ranks(jobs.lightning, tmp_path / "plain", False, folder=tmp_path))
    outcomes = on_ranks(jobs.lightning, tmp_path / "bus", True, folder=tmp_path)
    assert [one.exitcode for one in outcomes] == [0, 0], [one.output for one in outcomes]
    for rank, weights, seen, committed in (one.value for one in outcomes):
        jobs.assert_same(weights, plain)
        assert seen == (8 if rank == 0 else 0)
        assert bool(committed) == (rank == 0)
    assert len((tmp_path / "bus" / "scalars.jsonl").read_text().splitlines()) == 2 * 4 + 2
    saved = torch.load(tmp_path / "bus" / "epoch_2.ckpt", weights_only=False)
    assert saved["callbacks"]["trainbus"]["progress"]["iter"] == 8


def test_lightning_ddp_with_checkpoints_beside_the_training(tmp_path):
    pytest.importorskip("lightning")
    outcomes = on_ranks(jobs.lightning_saves, tmp_path / "bus", folder=tmp_path)
    assert [one.exitcode for one in outcomes] == [0, 0], [one.output for one in outcomes]
    assert sorted(bool(one.value[3]) for one in outcomes) == [False, True]
