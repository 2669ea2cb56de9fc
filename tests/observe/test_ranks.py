import pytest
from structlog.testing import capture_logs

from trainbus.eventloop.terminal import plain
from trainbus.observe.exchange import Comparison, Report
from trainbus.observe.ranks import Spent
from trainbus.observe.straggler import compare

PARTS = {
    "training": {"waiting for data": 0.1, "forward": 1.0, "backward": 2.0, "waiting for the other ranks": 0.0, "rest": 0.0},
    "hook": {"Histograms": 0.2},
    "trainbus": {"publishing": 0.01},
}


def spent(rank, iterations=100, **seconds):
    """What a rank spends, with other ``seconds`` for some parts."""
    names = {name.replace(" ", "_"): name for named in PARTS.values() for name in named}
    more = {names[key]: value for key, value in seconds.items()}
    scale = iterations / 100
    parts = {group: {name: more.get(name, one) * scale for name, one in named.items()} for group, named in PARTS.items()}
    return Spent(f"node{rank}", iterations, parts)


def straggler(*ranks):
    return compare(dict(enumerate(ranks)), len(ranks)).straggler


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([spent(0), spent(1), spent(2), spent(3)], None),
        ([spent(0, Histograms=1.2), spent(1, waiting_for_data=1.1)], None),  # slow in turn
        ([spent(0), spent(1, waiting_for_data=0.2, backward=1.9)], None),  # costs little
        ([spent(0, forward=2.0), spent(1, waiting_for_data=1.1)], (1, "waiting for data")),  # the others wait in the forward
        ([spent(0), spent(1), spent(2, backward=4.0)], (2, "backward")),  # independent ranks
        ([spent(0, waiting_for_the_other_ranks=2.0), spent(1, forward=3.0)], (1, "forward")),  # that agree to stop
    ],
)
def test_the_straggler_among_ranks(ranks, named):
    found = straggler(*ranks)
    assert (found and (found.rank, found.name)) == named


def test_min_median_max_and_the_slowest_rank():
    found = compare({0: spent(0), 1: spent(1, forward=1.5), 2: spent(2, forward=3.0)}, 3)
    assert found.times[0].name == "iteration"
    [forward] = [one for one in found.times if one.name == "forward"]
    assert [forward.min, forward.median, forward.max] == pytest.approx([0.01, 0.015, 0.03])
    assert (forward.rank, forward.host) == (2, "node2")
    assert "publishing" not in [one.name for one in found.times]  # less than 1 % of an iteration
    assert found.seconds == pytest.approx(0.0381)


# The others wait for the slow rank in the backward pass, so all iterations take equally long.
@pytest.mark.parametrize(
    ("slow", "name"), [("waiting_for_data", "waiting for data"), ("Histograms", "Histograms"), ("forward", "forward")]
)
def test_a_straggler_is_found_although_all_iterations_take_equally_long(slow, name):
    usual = {"waiting_for_data": 0.1, "Histograms": 0.2, "forward": 1.0}[slow]
    fast = [spent(rank, backward=3.0) for rank in (0, 1, 3)]
    found = straggler(fast[0], fast[1], spent(2, **{slow: usual + 1.0}), fast[2])
    assert (found.rank, found.host, found.name) == (2, "node2", name)
    assert (found.seconds, found.others, found.waited) == pytest.approx(((usual + 1) / 100, usual / 100, 0.01))


def test_ranks_without_times_are_missing():
    found = compare({0: spent(0), 2: spent(2)}, 4)
    assert found.missing == [1, 3]
    assert "Not measured: rank 1, 3" in plain(found)
    assert compare({0: spent(0)}, 2) is None
    assert compare({0: spent(0), 1: spent(1, iterations=0)}, 2) is None


def test_the_table_fits_a_terminal():
    text = plain(compare({0: spent(0, backward=3.0), 1: spent(1, waiting_for_data=1.1)}, 2))
    assert "rank 1 (node1)" in text
    assert "wait for rank 1" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


class Ranks:
    """Reports of ranks, compared as rank 0 does."""

    def __init__(self, size=3):
        self.comparison, self.number, self.total = Comparison(size), 0, {}

    def report(self, *ranks):
        self.number += 1
        for rank, one in enumerate(ranks):
            if one is not None:
                before = self.total.get(rank, (0, spent(rank, 0)))[1]
                self.total[rank] = (self.number, added(before, one))
        self.comparison.update({rank: Report(number, one) for rank, (number, one) in self.total.items()})
        self.comparison.warn_of_silent()
        return self.comparison.result()


def added(first, second):
    parts = {
        group: {name: one + second.parts[group][name] for name, one in named.items()} for group, named in first.parts.items()
    }
    return Spent(first.host, first.iterations + second.iterations, parts)


def slow(rank):
    return spent(rank, waiting_for_data=2.1)


def test_a_straggler_is_confirmed_by_three_comparisons_and_warned_about_once():
    ranks = Ranks()
    with capture_logs() as logs:
        found = [ranks.report(spent(0), spent(1), slow(2)) for _ in range(8)]
    assert found[0] is None  # where the comparison begins
    assert [one.recent.straggler is not None for one in found[1:]] == [False, False, True, True, True, True, True]
    assert [one.whole.straggler is not None for one in found[1:]] == [False, False, True, True, True, True, True]
    assert len(logs) == 1
    assert "wait for rank 2 on node2" in logs[0]["event"]


@pytest.mark.parametrize(
    ("at_times", "warned"),
    [(([2] * 5 + [1] * 5) * 2, [2, 1]), ([2, 2, None] * 4, [])],
    ids=["another straggler is another warning", "who is slow now and then is none"],
)
def test_a_straggler_is_warned_about_once_if_it_stays(at_times, warned):
    ranks = Ranks()
    with capture_logs() as logs:
        for at_present in at_times:
            ranks.report(*(slow(rank) if rank == at_present else spent(rank) for rank in range(3)))
    assert [f"rank {rank}" in line["event"] for rank, line in zip(warned, logs, strict=True)] == [True] * len(warned)


def test_a_lead_within_the_spread_of_the_ranks_own_figures_names_no_one():
    delays = [(0.0, 0.9, 1.4), (1.2, 0.0, 1.4), (0.3, 1.3, 1.4), (1.0, 0.2, 1.4), (0.1, 1.1, 1.4), (0.8, 0.4, 1.4)]
    ranks = Ranks()
    with capture_logs() as logs:
        found = [ranks.report(*(spent(rank, waiting_for_data=0.1 + one) for rank, one in enumerate(now))) for now in delays]
    assert all(one.recent.straggler is None and one.whole.straggler is None for one in found[1:])
    assert logs == []
    with capture_logs() as logs:  # the same noise, and a delay that exceeds it
        for now in delays:
            ranks.report(*(spent(rank, waiting_for_data=0.1 + one + 4 * (rank == 1)) for rank, one in enumerate(now)))
    assert ["rank 1" in line["event"] for line in logs] == [True]


def test_iterations_that_take_longer_than_a_period_are_compared_when_all_ranks_have_one():
    ranks = Ranks(2)
    ranks.report(spent(0), spent(1))
    assert ranks.report(spent(0), spent(1, 0)) is None
    found = ranks.report(spent(0, 0), spent(1))
    assert found.recent.iterations == 100


def test_a_rank_that_no_longer_answers_is_named_once_and_left_out():
    ranks = Ranks()
    with capture_logs() as logs:
        for _ in range(3):
            found = ranks.report(spent(0), spent(1), spent(2))
        assert found.recent.missing == []
        for _ in range(8):
            found = ranks.report(spent(0), spent(1), None)
    assert found.recent.missing == [2]
    assert ["rank 2 on node2 has not reported its times for 10 s" in line["event"] for line in logs] == [True]
