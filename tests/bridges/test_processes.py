"""Bridges in two processes (gloo): one pair of processes for each library, whose trainings the tests look at."""

import json
from functools import cache

import pytest
import torch

from trainbus.testing.host_job import assert_same

from ..ranks.conftest import on_ranks
from . import jobs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of the trainings in a library, and what each rank has seen."""

    @cache
    def train(library):
        pytest.importorskip(library)
        folder = tmp_path_factory.mktemp(library)
        outcomes = on_ranks(getattr(jobs, f"in_{library}"), folder, folder=folder)
        assert [one.exitcode for one in outcomes] == [0, 0], [one.output for one in outcomes]
        return folder, [one.value for one in outcomes]

    return train


@pytest.mark.long
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_stop_and_a_save_of_one_rank_take_effect_on_all(trained, library):
    _, ranks = trained(library)
    first, second = (rank["stops"] if library == "transformers" else rank[-1] for rank in ranks)
    assert first["steps"] == second["steps"]
    assert 6 <= first["steps"] <= 8
    assert first["reason"] == second["reason"] == "enough"
    assert f"iter_{first['steps']}" in [name.removesuffix(".ckpt") for name in first["committed"]]


def test_lightning_ddp(trained):
    folder, ranks = trained("lightning")
    for rank, (plain, bus, beside, _) in enumerate(ranks):
        assert_same(bus["weights"], plain["weights"])
        assert_same(beside["weights"], plain["weights"])
        assert bus["first"] == (8 if rank == 0 else 0)
        assert bool(bus["committed"]) == bool(beside["committed"]) == (rank == 0)
    assert len((folder / "bus" / "scalars.jsonl").read_text().splitlines()) == 2 * 4 + 2
    saved = torch.load(folder / "bus" / "epoch_2.ckpt", weights_only=False)
    assert saved["callbacks"]["trainbus"]["progress"]["iter"] == 8


FILES = {"trainbus.pt", "model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.parametrize("beside", [False, True])
def test_transformers_ddp(trained, beside):
    folder, ranks = trained("transformers")
    whole = [rank["whole", beside] for rank in ranks]
    for one, rank in zip(whole, ranks, strict=True):
        assert_same(one["weights"], rank["alone"]["weights"])
        assert_same(one["weights"], whole[0]["weights"])
    assert [one["first"] for one in whole] == [12, 0]  # the hook of rank 0
    names = ["checkpoint-6", "iter_6", "checkpoint-12", "iter_12"] if beside else ["iter_6", "iter_12"]
    assert [one["committed"] for one in whole] == [names, []]
    assert [one["begun"] for one in whole] == [[(0, 2, 0)], [(1, 2, 0)]]
    left = folder / f"whole {beside}"
    assert sorted(path.name for path in left.iterdir()) == sorted(set(names) - {"checkpoint-6"})
    for name in ("checkpoint-12", "iter_6") if beside else ("iter_6",):
        assert {path.name for path in (left / name).iterdir()} >= FILES
        assert not beside or json.loads((left / name / "trainbus-digests.json").read_text()).keys() >= FILES
    assert {one["best"] for one in whole} == {str(left / "checkpoint-12") if beside else None}


@pytest.mark.parametrize("beside", [False, True])
def test_transformers_ddp_goes_on_exactly(trained, beside):
    _, ranks = trained("transformers")
    if ("rest", beside) not in ranks[0]:
        pytest.skip("Transformers before 5.4 does not resume in two processes on a CPU")
    whole, rest = ([rank[name, beside] for rank in ranks] for name in ("whole", "rest"))
    assert rest[0]["begun"] == [(0, 2, 7 if beside else 6)]  # the trainer itself saves its last step, too
    assert rest[0]["first"] == 12
    for one in rest:
        for name in ("weights", "average"):
            assert_same(one[name], whole[0][name])
