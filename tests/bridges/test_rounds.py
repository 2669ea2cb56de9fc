"""Requests of one rank in another library's trainer: the ranks agree beside the training, and none is left waiting."""

import pytest

from ..ranks.conftest import on_ranks
from . import hosted_jobs as jobs


@pytest.fixture(params=[(2, 64), (4, 2)], ids=["one block", "two blocks"])
def everyone(request, tmp_path):
    size, block = request.param

    def call(function, *arguments):
        outcomes = on_ranks(jobs.in_blocks, block, function, tmp_path, *arguments, folder=tmp_path, size=size)
        assert [one.exitcode for one in outcomes] == [0] * size, [one.output for one in outcomes]
        return [one.value for one in outcomes]

    return call


@pytest.fixture
def equal(everyone):
    def call(function, *arguments):
        first, *others = everyone(function, *arguments)
        assert others == [first] * len(others)
        return first

    return call


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, -1])
def test_a_stop_and_a_save_of_one_rank_take_effect_on_all_after_the_same_iteration(equal, rank):
    done, saved, *why = equal(jobs.one_rank_stops, rank)
    assert done == 7  # the rank asks in its sixth iteration, when another may have begun the seventh
    assert saved == [(7, "iter_7.pt")]
    assert why == ["enough", "give more"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mount_point", "done"), [("before_train", 0), ("after_train_iter", 1), ("after_train_epoch", 4), ("after_val_epoch", 4)]
)
def test_what_all_ranks_ask_for_at_one_mount_point_takes_effect_there(equal, mount_point, done):
    assert equal(jobs.all_ranks_stop, mount_point) == (done, [(done, f"iter_{done}.pt")] if done else [], "enough")


@pytest.mark.long
def test_a_thread_of_one_rank_pauses_resumes_sets_the_rate_and_stops_all_ranks(everyone):
    (first, logs, paused), *others = everyone(jobs.a_thread_pauses)
    assert all((found, told) == (first, logs) for found, told, _ in others)  # at the same iterations
    names = [name for name, _ in logs]
    assert [name for name in names if name != "the learning rate was set"] == ["the run is paused", "the run continues"] * 2
    assert names.count("the learning rate was set") == 1
    assert paused[0] == paused[1]


@pytest.mark.long
def test_rates_that_all_ranks_set_take_effect_once_in_the_order_set(equal):
    assert equal(jobs.all_ranks_set_rates) == [0.3, 0.2]


@pytest.mark.long
def test_a_signal_to_one_rank_saves_and_stops_all(equal):
    assert equal(jobs.one_rank_gets_a_signal) == (4, [(4, "iter_4.pt")], "signal SIGTERM")


@pytest.mark.long
def test_ranks_that_ask_one_after_the_other_get_one_save(everyone):
    saved = [saved for _, saved, _ in everyone(jobs.ranks_ask_one_after_the_other)]
    assert saved == [saved[0]] * len(saved)
    assert len(saved[0]) == 1


@pytest.mark.long
def test_a_rank_that_evaluates_alone_may_stop_the_others(equal):
    assert equal(jobs.one_rank_evaluates)[0] in (5, 6)


@pytest.mark.long
@pytest.mark.parametrize("which", [-1, -2], ids=["the last", "the first of its block, or of all"])
def test_a_request_is_refused_when_a_rank_has_no_bus(everyone, which):
    found = everyone(jobs.a_rank_has_no_bus, which)
    without = len(found) + which
    assert found.pop(without) is None
    for done, told in found:
        assert done == jobs.BATCHES * jobs.EPOCHS
        assert without in told[0]["ranks"]
        assert 0 not in told[0]["ranks"] or not without
        assert "attach(bus, trainer) on all ranks" in told[0]["event"]


@pytest.mark.long
def test_a_request_in_a_training_that_has_ended_elsewhere_ends(everyone):
    *others, (done, told) = everyone(jobs.one_rank_asks_when_the_others_have_ended)
    assert {done for done, _ in others} == {done}
    assert told == ["the training has ended"]


@pytest.mark.long
def test_a_round_without_an_answer_of_a_rank_names_it_and_ends(equal):
    done, told = equal(jobs.one_agent_is_silent)
    assert done == jobs.BATCHES * jobs.EPOCHS
    assert [entry["reason"] for entry in told] == ["no answer of rank 1"]


def test_ctrl_c_on_one_rank_ends_the_others(tmp_path):
    first, second = on_ranks(jobs.one_rank_fails, tmp_path, folder=tmp_path)
    assert "KeyboardInterrupt" in second.error
    assert first.exitcode == 1
