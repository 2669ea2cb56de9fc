"""Requests of one rank in another library's trainer: the ranks agree beside the training, and none is left waiting."""

import pytest

from ..ranks.conftest import on_ranks
from . import hosted_jobs as jobs


@pytest.fixture
def both(tmp_path):
    def call(function, *arguments):
        outcomes = on_ranks(function, tmp_path, *arguments, folder=tmp_path)
        assert [one.exitcode for one in outcomes] == [0, 0], [one.output for one in outcomes]
        return [one.value for one in outcomes]

    return call


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_and_a_save_of_one_rank_take_effect_on_all_after_the_same_iteration(both, rank):
    first, second = both(jobs.one_rank_stops, rank)
    assert first == second
    done, saved, reason = first
    assert done == 7  # the rank asks in its sixth iteration, when the other may have begun the seventh
    assert saved == [(7, "iter_7.pt")]
    assert reason == "enough"


@pytest.mark.parametrize(
    ("mount_point", "done"), [("before_train", 0), ("after_train_iter", 1), ("after_train_epoch", 4), ("after_val_epoch", 4)]
)
def test_what_all_ranks_ask_for_at_one_mount_point_takes_effect_there(both, mount_point, done):
    for found in both(jobs.all_ranks_stop, mount_point):
        assert found == (done, [(done, f"iter_{done}.pt")] if done else [], "enough")


def test_a_thread_of_one_rank_pauses_resumes_sets_the_rate_and_stops_all_ranks(both):
    (first, logs, paused), (second, others, _) = both(jobs.a_thread_pauses)
    assert first == second
    assert logs == others  # at the same iterations
    names = [name for name, _ in logs]
    assert [name for name in names if name != "the learning rate was set"] == ["the run is paused", "the run continues"] * 2
    assert names.count("the learning rate was set") == 1
    assert paused[0] == paused[1]


def test_a_signal_to_one_rank_saves_and_stops_all(both):
    first, second = both(jobs.one_rank_gets_a_signal)
    assert first == second == (4, [(4, "iter_4.pt")], "signal SIGTERM")


def test_a_rank_that_evaluates_alone_may_stop_the_others(both):
    first, second = both(jobs.one_rank_evaluates)
    assert first == second
    assert first[0] in (5, 6)


def test_a_request_is_refused_when_a_rank_has_no_bus(both):
    (done, told), _ = both(jobs.one_rank_has_a_bus)
    assert done == jobs.BATCHES * jobs.EPOCHS
    assert [entry["ranks"] for entry in told] == [[1]]
    assert "bus.attach(trainer) on all ranks" in told[0]["event"]


def test_ctrl_c_on_one_rank_ends_the_others(tmp_path):
    first, second = on_ranks(jobs.one_rank_fails, tmp_path, folder=tmp_path)
    assert "KeyboardInterrupt" in second.error
    assert first.exitcode == 1
