"""Bridges in two processes (gloo)."""

import pytest
import torch

from ..ranks.conftest import on_ranks
from . import jobs


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
