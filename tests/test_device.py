"""The door to accelerators, on a pretended type of device: PyTorch knows the name "hpu", and has no module for it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from trainbus.eventloop import device as door

HPU = torch.device("hpu", 1)
forget_modules = getattr(torch.get_device_module, "cache_clear", lambda: None)  # torch 2.7 looks each time


class Event:
    def record(self, stream):
        self.recorded = stream


class Module(SimpleNamespace):
    """Two devices with a random state each. ``current_stream`` tells which device it was asked for."""

    def __init__(self):
        self.states, self.index = [torch.tensor([1]), torch.tensor([2])], 0
        super().__init__(Event=Event, Stream=lambda device: f"new on {device}")

    @contextmanager
    def stream(self, stream):
        yield

    def current_stream(self, device):
        return f"current of {device}"

    def is_initialized(self):
        return True

    def device_count(self):
        return len(self.states)

    def current_device(self):
        return self.index

    def set_device(self, index):
        self.index = index

    def get_device_name(self, index):
        return f"Hypothetical {index}"

    def memory_allocated(self, device):
        return 100 * (1 + device.index)

    def get_rng_state_all(self):
        return [*self.states]

    def set_rng_state(self, state, device):
        self.states[device.index] = state


@pytest.fixture
def hpu(monkeypatch, change):
    """The accelerator of this process."""
    module = Module()
    monkeypatch.setattr(torch, "hpu", module, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("hpu"))
    change(door.NEW_PINNED, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    forget_modules()
    door.forget_types()
    yield module
    forget_modules()
    door.forget_types()


def test_a_type_with_streams_events_and_pinned_memory_is_asynchronous(hpu):
    assert door.is_asynchronous(HPU)
    assert not door.is_asynchronous(torch.device("cpu"))  # although torch.cpu has such names
    assert not door.is_asynchronous(torch.device("meta"))


@pytest.mark.parametrize("lacking", ["streams", "memory"])
def test_any_other_type_is_not_which_is_logged_once(hpu, change, capsys, lacking):
    def no_memory(shape, dtype):
        raise NotImplementedError("no pinned memory here\nat line 3")

    if lacking == "streams":
        del hpu.Stream
    else:
        change(door.NEW_PINNED, no_memory)
    assert not any(door.is_asynchronous(torch.device("hpu", index % 2)) for index in range(4))
    assert capsys.readouterr().err.count("hpu") == 1


def test_an_event_is_recorded_on_the_current_stream_of_the_device(hpu):
    assert door.end_of_queue(HPU).recorded == "current of hpu:1"
    assert door.stream_finder(HPU)() == "current of hpu:1"
    assert door.new_stream(HPU) == "new on hpu:1"


def test_tensors_on_the_cpu_are_neither_elsewhere_nor_asynchronous():
    tensors = [torch.ones(2), torch.ones(3)]
    assert not door.any_elsewhere(tensors)
    assert not door.any_asynchronous(tensors)
    assert door.any_elsewhere([*tensors, torch.ones(1, device="meta")])


def test_another_thread_gets_the_current_device_of_the_thread_that_asked(hpu):
    hpu.set_device(1)
    hand_over = door.handed_over()
    hpu.set_device(0)
    hand_over()
    assert (hpu.index, door.current_device()) == (1, HPU)


def test_a_process_takes_the_device_of_its_local_rank(hpu):
    door.use_device(3)
    assert hpu.index == 1


def test_names_and_memory_are_those_of_all_devices(hpu, monkeypatch):
    assert door.devices() == ["hpu:0", "hpu:1"]
    assert door.device_names() == ["Hypothetical 0", "Hypothetical 1"]
    assert door.memory_allocated(HPU) == 200
    monkeypatch.delattr(Module, "get_device_name")
    assert door.device_names() == ["hpu:0", "hpu:1"]


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_random_states_are_restored_for_the_devices_that_are_there(hpu, saved, capsys):
    door.set_random_states_of_devices({"hpu": [torch.tensor([10 + index]) for index in range(saved)]})
    assert [int(state) for state in door.random_states_of_devices()["hpu"]] == [10, 11 if saved > 1 else 2]
    assert ("saved=" in capsys.readouterr().err) == (saved != 2)


def test_random_states_of_another_type_are_left_out_and_named(hpu, capsys):
    door.set_random_states_of_devices({"cuda": [torch.tensor([7])]})
    assert [int(state) for state in hpu.states] == [1, 2]
    assert "cuda" in capsys.readouterr().err


def test_all_devices_that_a_process_uses_are_seeded(hpu, monkeypatch):
    seeds = []
    monkeypatch.setattr(hpu, "manual_seed_all", seeds.append, raising=False)
    door.seed_devices(3)
    monkeypatch.delattr(hpu, "manual_seed_all")
    monkeypatch.setattr(hpu, "manual_seed", seeds.append, raising=False)  # as MPS
    door.seed_devices(4)
    hpu.is_initialized = lambda: False
    door.seed_devices(5)
    assert seeds == [3, 4]


def test_a_process_that_has_not_used_its_accelerator_has_no_random_states_of_it(hpu):
    hpu.is_initialized = lambda: False
    assert door.random_states_of_devices() == {}


def test_a_type_with_one_device_has_one_random_state(hpu, monkeypatch):
    """As MPS: no index, no list."""
    only = SimpleNamespace(device_count=lambda: 1, get_rng_state=lambda: torch.tensor([5]), set_rng_state=hpu.states.append)
    monkeypatch.setattr(torch, "hpu", only)
    forget_modules()
    door.set_random_states_of_devices({"hpu": [torch.tensor([6])]})
    assert int(hpu.states[-1]) == 6
    assert [int(state) for state in door.random_states_of_devices()["hpu"]] == [5]
    assert (door.current_device(), door.memory_allocated(HPU)) == (torch.device("hpu"), None)
    door.use_device(1)
    door.handed_over()()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_there_is_nothing():
    assert door.devices() == door.device_names() == []
    assert (door.current_device(), door.random_states_of_devices()) == (None, {})
    assert door.memory_allocated(torch.device("cpu")) is None
    door.use_device(1)
    door.handed_over()()
    door.seed_devices(1)
    door.empty_cache()
