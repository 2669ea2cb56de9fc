"""The state of several processes in a checkpoint of another program: each goes on with its own random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Bus, ConfigurationError, Run
from hooks import DistSamplerSeedHook, EMAHook

from . import jobs


def trains(folder: str, part: str, shard: bool = False) -> Any:
    """Train two epochs; ``"half"`` ends after one, and rank 0 writes the state of both; ``"rest"`` goes on from that."""
    model, file = jobs.make_loop(None, dropout=0.3, shard=shard).model, Path(folder, "host.pt")
    optimizer, data, bus = torch.optim.AdamW(model.parameters(), lr=0.01), jobs.loader(shuffle=True), Bus()
    bus.add(EMAHook(), DistSamplerSeedHook())
    with Run(bus, model=model, optimizer=optimizer, seed=5) as run:
        torch.rand(run.rank)  # the ranks draw different numbers from here on
        if part == "rest":
            run.apply_state(torch.load(file, weights_only=True))
        for _ in run.epochs(2):
            for batch in run.train(data):
                optimizer.zero_grad()
                jobs.step(model, batch).backward()
                optimizer.step()
            if part == "half":
                checkpoint: dict[str, Any] = {}
                run.gather_state(checkpoint)
                if not run.rank:
                    torch.save(checkpoint, file)
                break
    return [value.tolist() for value in jobs.weights(model).values()], torch.rand(3).tolist()


def test_every_rank_resumes_bitwise_from_the_state_of_rank_0(ranks, tmp_path):
    whole = ranks(trains, str(tmp_path), "whole")
    ranks(trains, str(tmp_path), "half")
    assert len(torch.load(tmp_path / "host.pt", weights_only=True)["trainbus"]["ranks"]) == 2
    assert ranks(trains, str(tmp_path), "rest") == whole
    assert whole[0][0] == whole[1][0]
    assert whole[0][1] != whole[1][1]


def refused(folder: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        trains(folder, "half", shard=True)
    return str(caught.value)


def test_a_sharded_model_is_an_error_with_advice(ranks, tmp_path):
    for message in ranks(refused, str(tmp_path)):
        assert "does not support sharded models" in message
        assert "run.request_save()" in message
