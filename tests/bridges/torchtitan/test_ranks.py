"""torchtitan in two processes on the CPU: FSDP2 by gloo."""

from pathlib import Path

import pytest

pytest.importorskip("torchtitan.trainer")

from trainbus.testing.host_job import assert_same

from ...ranks.conftest import on_ranks
from . import rank_jobs


@pytest.fixture(scope="module")
def ranks(tokenizer, tmp_path_factory):
    """What each rank has seen."""
    folder = tmp_path_factory.mktemp("ranks")
    outcomes = on_ranks(rank_jobs.train, str(tokenizer), str(folder), folder=folder)
    assert [one.exitcode for one in outcomes] == [0, 0], [one.output for one in outcomes]
    return [one.value for one in outcomes]


def test_a_sharded_training_has_the_same_weights_with_a_bus(ranks):
    for one in ranks:
        assert_same(one["whole"]["weights"], one["plain"]["weights"])


@pytest.mark.parametrize("by", ["own", "hook"])
def test_a_sharded_training_goes_on_with_its_averages(ranks, by):
    for one in ranks:
        (path,) = one[by]["loaded"]
        assert Path(path).name == {"own": "step-4", "hook": "iter_4"}[by]
        assert_same(one[by]["weights"], one["whole"]["weights"])
        assert_same(one[by]["averages"], one["whole"]["averages"])
        assert one[by]["hook"] == one["whole"]["hook"]
        assert one[f"{by}, cut"]["step"] == 5


def test_the_mean_loss_of_the_ranks_is_the_one_that_torchtitan_logs(ranks):
    both = [one["whole"]["losses"] for one in ranks]
    assert [sum(pair) / 2 for pair in zip(*both, strict=True)] == pytest.approx(ranks[0]["whole"]["logged"])
    assert both[0] != both[1]


def test_a_stop_of_one_rank_ends_all_at_one_step(ranks):
    first, second = (one["stops"]["step"] for one in ranks)
    assert first == second
    assert 3 <= first < 8


def test_the_first_rank_tells_of_checkpoints(ranks):
    assert [one["whole"]["committed"] for one in ranks][1] == []
    assert {"iter_2", "step-2", "step-8"} <= set(ranks[0]["whole"]["committed"])


@pytest.fixture(scope="module")
def saves(tokenizer, tmp_path_factory):
    """What each rank has seen of saves by our manager."""
    folder = tmp_path_factory.mktemp("saves")
    outcomes = on_ranks(rank_jobs.save, str(tokenizer), str(folder), folder=folder, timeout=300)
    assert [one.exitcode for one in outcomes] == [0, 0], [one.output for one in outcomes]
    return [one.value for one in outcomes]


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("place", ["data", "rename", "hook"])
def test_a_save_that_one_rank_cannot_make_fails_on_all(saves, mode, place):
    for one in saves:
        assert "the disk is full" in one[mode, place]["error"]
        assert f"rank {int(place == 'data')}: OSError" in one[mode, place]["error"]
        assert one[mode, place]["own"] == ([] if place == "hook" else ["step-2"])
        assert one[mode, place]["names"] == (["iter_2"] if place == "hook" else [])


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_after_a_failed_save_all_ranks_go_on_from_the_one_before(saves, mode):
    for one in saves:
        assert one[mode, "again"]["error"] == ""
        assert one[mode, "again"]["own"] == ["step-2", "step-4", "step-6", "step-8"]
        assert_same(one[mode, "again"]["weights"], one["plain"]["weights"])
