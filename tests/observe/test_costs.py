import time

import pytest

from eventloop import Bus, BusStateError

from ..hooks.conftest import make_loop


def slow(event):
    time.sleep(0.001)


def test_the_parts_add_up_to_the_wall_time_and_name_the_hook():
    bus = Bus(timing=True)
    bus.on("after_train_iter", slow)
    make_loop(bus=bus).run()
    costs = bus.costs()
    assert sum(part.seconds for part in costs.parts) == pytest.approx(costs.wall, rel=0.02)
    [part] = [one for one in costs.parts if "slow" in one.name]
    assert part.mount_point == "after_train_iter"
    assert part.seconds >= part.calls * 0.001
    assert "slow" in str(costs)


def test_costs_of_a_bus_that_does_not_measure_are_an_error():
    with pytest.raises(BusStateError, match=r"Bus\(timing=True\)"):
        Bus().costs()
