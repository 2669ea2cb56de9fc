"""The simulated device: its work runs late, on its streams, and memory that is in use no longer is overwritten."""

import copy
import threading
from typing import Any

import pytest
import torch

from .conftest import TAKEN, DeviceUnderTest

pytestmark = TAKEN


@pytest.fixture
def sim(accelerator: DeviceUnderTest) -> Any:
    if accelerator.kind != "sim" or not accelerator.has_streams:
        pytest.skip("not the simulated device with streams")
    from trainbus.testing import sim

    return sim


def ordered(*orders: str) -> Any:
    return pytest.mark.parametrize("accelerator", orders, indirect=True)


def test_tensors_are_plain_ones_of_two_devices(sim: Any):
    for index in (0, 1):
        parameter = torch.nn.Parameter(torch.ones(2, 3, device=f"sim:{index}"))
        assert (type(parameter), parameter.device) == (torch.nn.Parameter, torch.device("sim", index))
        assert parameter.data_ptr() == parameter.view(6)[:3].data_ptr() != 0
        parameter.detach().view(6)[1:3].fill_(5)
        assert parameter.tolist() == [[1, 5, 5], [1, 1, 1]]
        assert (parameter._version, copy.deepcopy(parameter).tolist()) == (1, parameter.tolist())
    with pytest.raises(RuntimeError):
        torch.ones(1, device="sim:0") + torch.ones(1, device="sim:1")


def test_training_gives_the_weights_of_the_cpu(sim: Any, stream: str):
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = torch.nn.Linear(4, 9), torch.nn.BatchNorm1d(9), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(9, 2)
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(2)
        for number in range(4):
            loss = torch.nn.functional.cross_entropy(
                model(torch.ones(3, 4).to(device) * number), torch.arange(3).to(device) % 2
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return [loss.detach().cpu(), *(value.cpu() for value in model.state_dict().values())]

    for ours, expected in zip(train("sim:1"), train("cpu"), strict=True):
        assert torch.equal(ours, expected)


@ordered("needed", "rivals")
def test_work_runs_when_the_host_waits_for_it(sim: Any):
    host = sim.pinned((3,), torch.float32)
    ones = torch.ones(3, device="sim:1")
    host.copy_(ones, non_blocking=True)
    event = sim.module.current_stream("sim:1").record_event()
    assert host.isnan().all()
    assert not event.query()
    event.synchronize()
    assert host.tolist() == [1, 1, 1]


@ordered("needed")
def test_a_stream_that_does_not_wait_for_another_misses_its_work(sim: Any):
    number = torch.zeros((), device="sim:1")
    for waits in (False, True):
        side = sim.Stream("sim:1")
        number.fill_(7)
        if waits:
            side.wait_stream(sim.module.current_stream("sim:1"))
        with sim.module.stream(side):
            copied = number.clone()
            assert (copied.item() == 7) == waits
        number.fill_(0)


@ordered("rivals")
def test_a_stream_that_is_not_waited_for_is_overtaken(sim: Any):
    main, side = sim.module.current_stream("sim:1"), sim.Stream("sim:1")
    for waits in (False, True):
        number = torch.full((), 7, device="sim:1")
        side.wait_stream(main)
        with sim.module.stream(side):
            copied = number.clone()
        if waits:
            main.wait_stream(side)
        number.fill_(0)
        with sim.module.stream(side):
            assert (copied.item() == 7) == waits


@ordered("rivals")
@pytest.mark.parametrize("how", ["", "keep", "record_stream", "wait"])
def test_memory_that_another_stream_still_reads_is_overwritten_unless_it_is_kept(sim: Any, how: str):
    main, side = sim.module.current_stream("sim:1"), sim.Stream("sim:1")
    number = torch.full((), 7.0, device="sim:1")
    side.wait_stream(main)
    with sim.module.stream(side):
        copied = number.clone()
    if how == "record_stream":
        number.record_stream(side)
    if how == "wait":
        main.wait_stream(side)
    kept = number if how == "keep" else None
    del number
    with sim.module.stream(side):
        assert (copied.item() == 7) == bool(how)
    del kept


def test_pinned_memory_is_free_when_copies_from_it_are_done(sim: Any):
    pinned = sim.pinned((3,), torch.float32).fill_(1)
    assert sim.is_pinned(pinned[1:])
    assert not sim.is_pinned(torch.ones(3))
    arrived = pinned.to("sim:1", non_blocking=True)
    view = pinned.numpy()
    del pinned
    assert arrived.tolist() == [1, 1, 1]
    del view


def test_waits_are_counted_by_thread_and_can_be_errors(sim: Any):
    number, pinned = torch.ones((), device="sim:1"), sim.pinned((), torch.float32)
    with sim.no_waits():
        pinned.copy_(number * 2, non_blocking=True)
        for wait in (number.item, number.cpu, sim.module.synchronize, lambda: torch.ones(1).to("sim:1")):
            with pytest.raises(sim.HostWait):
                wait()
        thread = threading.Thread(target=number.item)
        thread.start()
        thread.join()
    number.cpu()
    assert sim.waits == [(thread.ident, "item"), (threading.get_ident(), "copy to the host")]


def test_each_device_has_a_generator_and_each_thread_a_current_device(sim: Any):
    torch.manual_seed(3)
    first, cpu = torch.rand(4, device="sim:1"), torch.get_rng_state()
    states = sim.module.get_rng_state_all()
    second = torch.rand(4, device="sim:1")
    sim.module.set_rng_state_all(states)
    assert torch.equal(torch.rand(4, device="sim:1"), second)
    assert torch.equal(torch.get_rng_state(), cpu)
    assert torch.equal(first.cpu(), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    sim.module.set_device(1)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(sim.module.current_device()))
    thread.start()
    thread.join()
    assert (found, torch.ones(1, device="sim").device.index) == ([0], 1)


def test_memory_in_use_is_counted(sim: Any):
    before = sim.module.memory_allocated("sim:1")
    kept = torch.ones(1000, device="sim:1")
    assert sim.module.memory_allocated("sim:1") == before + 4000
    del kept
    assert sim.module.memory_allocated("sim:1") == before
