from fnmatch import fnmatchcase

import pytest

from trainbus.observe import Costs, Durations, Growth, LaneCosts, Part, RankCosts, Straggler
from trainbus.observe.verdict import duration, expensive, size

STEPS = Durations({160: 1000})


def part(name, share, *, group="hook", calls=1000, mount_point="after_train_iter"):
    return Part(group, name, calls, share * 10, share, 0.0, mount_point)


def training(name, share):
    return part(name, share, group="training", calls=0, mount_point="")


def costs(*parts, **fields):
    return Costs(10.0, list(parts), STEPS, **fields)


def lane(**fields):
    return LaneCosts(
        "Histograms.draw", ["after_train_iter"], **{"delivered": 900, "failed": 0, "dropped": 0, "pending": 0} | fields
    )


def grown(process, *others):
    return {"memory": 10**9, "growth": [Growth("process", process, 60.0, 500), *others]}


COPIES, WAITS = (training(f"{what} for checkpoints", share) for what, share in (("copying", 0.01), ("waiting", 0.3)))
SLOW = Straggler(2, "node7", "training", "waiting for data", 0.05, 0.002, 0.048)
THERE = "rank 2 (node7): waiting for data takes 50 ms an iteration there, 2 ms on the others"
METHODS = [part(f"Mine.{name}_train_iter", 0.02) for name in ("before", "after")]  # which count together
LEAKS = Growth("Leaky", 110_000_000, 60.0, 500)
BUFFER, LARGE_BUFFER = (Growth("Buffer", size, 60.0, 1000) for size in (90_000, 290_000_000))
GRAPHS = Growth("step", 88_000, 60.0, 1000, True)


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (costs(training("step", 0.9), part("EMAHook.after_train_iter", 0.02), training("waiting for data", 0.04)), None),
        (costs(*METHODS, part("Mine.write", 0.01, group="hand-off")), "Mine takes 5.0% of the time: 500 µs an iteration."),
        (costs(part("watch", 0.05, calls=2, mount_point="after_val")), "watch takes 5.0% * 250 ms a call at after_val."),
        (costs(training("validation", 0.24), training("step", 0.7)), None),
        (costs(training("validation", 0.4)), "Validation takes 40% of the time (4 s)."),
        (costs(lanes=[lane(waited=0.5, seconds=3.69)]), "* waits 5.0% * full lane of Histograms: * takes 4.1 ms an event."),
        (costs(lanes=[lane(dropped=100)]), "The lane of Histograms dropped 100 of 1000 events."),
        (costs(training("copying for checkpoints", 0.02)), "Checkpoints hold training up for 2.0% of the time (200 ms)."),
        (costs(COPIES, WAITS), "Checkpoints * 31% * (3.1 s, mostly because the one before was still being written)."),
        (costs(**grown(120_000_000, LEAKS)), "Memory grew by 120 MB in 60 s, 500 iterations; Leaky keeps 220 kB more *"),
        (costs(**grown(1_000_000)), None),
        (costs(part("Fast", 0.01), **grown(291_000_000)), "* 291 MB *loss.item()*"),  # without a suspect
        (costs(**grown(291_000_000, BUFFER, GRAPHS)), "*step keeps *loss.item()*"),  # how to mend it
        (costs(**grown(145_500_000, GRAPHS, LARGE_BUFFER)), "*; Buffer keeps 290 kB *"),  # which explains the growth
        (costs(training("backward", 0.9), ranks=RankCosts(4, 100, 0.096, [], SLOW)), f"The other ranks wait 50% * {THERE}."),
        (costs(training("backward", 0.9), ranks=RankCosts(4, 100, 0.096, [])), None),
    ],
)
def test_what_is_expensive_is_told_with_its_figures(measured, told):
    sentences = expensive(measured)
    assert len(sentences) == (told is not None)
    assert all(fnmatchcase(one, told) for one in sentences)


def test_the_worst_comes_first():
    parts = [training("step", 0.5), part("Histograms.after_train_iter", 0.11), training("waiting for data", 0.38)]
    assert expensive(costs(*parts)) == [
        "38% of the time is waiting for data: 3.8 ms an iteration.",
        "Histograms takes 11% of the time: 1.1 ms an iteration.",
    ]
    assert len(expensive(costs(*parts), most=1)) == 1


def test_durations_have_a_unit():
    seconds = (0, 2.5e-7, 0.0041, 0.25, 61, 150, 7200, 1e6)
    assert [duration(one) for one in seconds] == ["0 µs", "0.25 µs", "4.1 ms", "250 ms", "61 s", "2.5 min", "2 h", "278 h"]


def test_sizes_have_a_unit():
    assert [size(one) for one in (0, 512, 118_400_000, 2.5e9)] == ["0 B", "512 B", "118 MB", "2.5 GB"]


@pytest.mark.parametrize(("full", "then"), [("block", "training waits"), ("drop_new", "new events are dropped")])
def test_a_lane_that_fills_is_told_with_the_time_until_it_is_full(full, then):
    filling = {"pending": 256, "seconds": 9.5, "capacity": 1024, "full": full}
    [sentence] = expensive(costs(lanes=[lane(**filling)]))
    assert "full in about 30 s" in sentence
    assert then in sentence
    for calm in ({"seconds": 0.5}, {"pending": 3}, {"capacity": 0}):
        assert expensive(costs(lanes=[lane(**filling | calm)])) == []
