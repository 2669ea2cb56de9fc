"""Copying beside the training what only a step changes: the step waits, the file holds one moment, and a change shows."""

import os
import threading
import time

import pytest
import torch

from trainbus.eventloop import CheckpointError
from trainbus.eventloop.checkpoint import AsyncSaver, Overlap, StageBuffer, load, stage, write

from ..waiting import on_threads


@pytest.fixture
def late(monkeypatch):
    """Copies of an Overlap begin only when the returned event is set."""
    copy = torch._foreach_copy_
    go = threading.Event()

    def held(*args, **options):
        if threading.current_thread().name.startswith("trainbus-stage"):
            assert go.wait(30)
        return copy(*args, **options)

    monkeypatch.setattr("trainbus.eventloop.checkpoint.layout.foreach_copy_", held)
    return go


class Job:
    """One weight and its momentum, which count the steps; a buffer of no optimizer."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.zeros(1000))
        self.buffer = torch.zeros(3)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, momentum=0.5)
        self.step()

    def step(self):
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer.step()

    def tree(self):
        return {"weight": self.weight.detach(), "buffer": self.buffer, "optimizer": self.optimizer.state_dict()}


@pytest.fixture
def job():
    return Job()


@pytest.fixture
def overlap(job):
    made = Overlap([job.optimizer])
    yield made
    made.close()


def test_the_next_step_waits_for_the_copy_and_the_file_has_the_weights_before_it(job, overlap, late, written):
    staged = stage(job.tree(), overlap=overlap)
    job.buffer.add_(1)  # of no optimizer: copied at the save point
    stepping = threading.Thread(target=job.step)
    stepping.start()
    time.sleep(0.02)
    assert job.weight[0].item() == -1  # it waits
    late.set()
    stepping.join()
    assert job.weight[0].item() == -2.5
    loaded = written(staged)
    assert torch.equal(loaded["weight"], torch.full((1000,), -1.0))
    assert torch.equal(loaded["buffer"], torch.zeros(3))
    assert torch.equal(loaded["optimizer"]["state"][0]["momentum_buffer"], torch.ones(1000))


def test_with_a_saver_each_step_waits_for_the_copy_of_the_save_before_it(late, tmp_path):
    weight = torch.nn.Parameter(torch.zeros(300_000))
    optimizer = torch.optim.SGD([weight], lr=1.0, maximize=True)
    with AsyncSaver(overlap=[optimizer]) as saver:
        for number in range(10):
            late.clear()
            saver.save({"w": weight.detach()}, tmp_path / f"{number}")
            threading.Timer(0.01, late.set).start()
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    for number in range(10):
        assert (load(tmp_path / f"{number}")["w"] == number).all()


def test_many_small_weights_are_of_the_same_moment_as_large_ones(late, written):
    weights = [torch.nn.Parameter(torch.zeros(10)) for _ in range(300)] + [torch.nn.Parameter(torch.zeros(10_000))]
    optimizer = torch.optim.SGD(weights, lr=1.0, maximize=True)
    overlap = Overlap([optimizer])
    staged = stage([weight.detach() for weight in weights], overlap=overlap)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    threading.Timer(0.02, late.set).start()
    optimizer.step()
    assert all((weight == 0).all() for weight in written(staged))
    assert all((weight == 1).all() for weight in weights)
    overlap.close()


ONES = torch.ones(10)
CHANGES = {"shape": (2500, ONES.view(2, 5)), "dtype": (2999, ONES.double()), "length": (1500, torch.ones(11)),
           "tied": (1500, None), "elsewhere": (0, ONES)}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("index", "data"), CHANGES.values(), ids=CHANGES)
def test_small_weights_that_two_threads_copy_are_those_of_the_save_point(index, data, written):
    """Also when a weight that the second save finds is another one than the first save saw."""
    weights = [torch.nn.Parameter(torch.full((10,), float(i))) for i in range(3000)]
    overlap, buffer = Overlap([torch.optim.SGD(weights)]), StageBuffer()
    stage(weights, buffer, overlap=overlap).release()
    weights[index].data = weights[0].data if data is None else data
    loaded = written(stage(weights, buffer, overlap=overlap))
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(loaded, weights, strict=True))
    assert (loaded[0].data_ptr() == loaded[1500].data_ptr()) == (weights[0].data_ptr() == weights[1500].data_ptr())
    overlap.close()


def test_a_small_weight_that_cannot_be_saved_any_more_is_named(written):
    weights = {f"w{i}": torch.zeros(10) for i in range(3000)}
    overlap, buffer = Overlap([torch.optim.SGD(list(weights.values()))]), StageBuffer()
    stage(weights, buffer, overlap=overlap).release()
    for i in (500, 1500, 2900):
        for bad in (torch.empty(10, dtype=torch.uint4), weights["w1"].to("meta")):
            with pytest.raises(CheckpointError, match=rf"^w{i}: "):
                stage({**weights, f"w{i}": bad}, buffer, overlap=overlap)
    assert list(written(stage(weights, buffer, overlap=overlap))) == list(weights)
    overlap.close()


def test_a_weight_changed_during_the_copy_fails_the_save_and_not_the_step_and_is_named(job, overlap, late, tmp_path):
    staged = stage({"model": job.tree()}, overlap=overlap)
    with torch.no_grad():
        job.weight.add_(1)
    late.set()
    job.step()
    with pytest.raises(CheckpointError, match=r"^model\.weight "):
        write(staged, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_optimizer_state_is_copied_late_and_guarded_like_weights(job, overlap, late, tmp_path):
    staged = stage(job.tree(), overlap=overlap)
    job.optimizer.state[job.weight]["momentum_buffer"].zero_()
    late.set()
    with pytest.raises(CheckpointError, match=r"^optimizer\.state\.0\.momentum_buffer "):
        write(staged, tmp_path / "c")


def test_weights_without_versions_are_copied_at_the_save_point(late, written):
    """Those made in inference mode: torch counts no changes of them."""
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)
    overlap = Overlap([torch.optim.SGD([weight], lr=1.0)])
    staged = stage({"w": weight}, overlap=overlap)
    with torch.inference_mode():
        weight.add_(1)
    late.set()
    assert (written(staged)["w"] == 0).all()
    overlap.close()


def test_memory_is_not_reused_while_a_released_copy_is_running(job, overlap, late, written):
    buffer = StageBuffer()
    stage(job.tree(), buffer, overlap=overlap).release()
    second = stage(job.tree(), buffer, overlap=overlap)
    assert buffer.bytes == 2 * (2 * 4000 + 12)
    late.set()
    job.step()
    assert torch.equal(written(second)["weight"], torch.full((1000,), -1.0))
    stage(job.tree(), buffer, overlap=overlap)
    assert buffer.bytes == 2 * (2 * 4000 + 12)


def test_parameters_that_are_replaced_during_the_copy_leave_the_old_ones_in_the_file(job, overlap, late, written):
    staged = stage(job.tree(), overlap=overlap)
    job.weight = torch.nn.Parameter(torch.full((1000,), 7.0))
    job.optimizer.param_groups[0]["params"] = [job.weight]
    late.set()
    job.step()
    assert torch.equal(written(staged)["weight"], torch.full((1000,), -1.0))


def test_closing_leaves_the_optimizer_as_it_was(job):
    hooks = dict(job.optimizer._optimizer_step_pre_hooks)
    overlap = Overlap([job.optimizer])
    assert len(job.optimizer._optimizer_step_pre_hooks) == len(hooks) + 1
    overlap.close()
    overlap.close()
    assert dict(job.optimizer._optimizer_step_pre_hooks) == hooks


def test_the_number_of_torch_threads_is_unchanged(job, overlap):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        stage(job.tree(), overlap=overlap).pieces()
        assert torch.get_num_threads() == 2
        found = []
        on_threads(lambda _: found.append(torch.get_num_threads()), None)
        assert found == [2]
    finally:
        torch.set_num_threads(threads)


def test_tied_weights_and_views_of_them_are_of_the_same_moment(overlap, job, late, written):
    tree = {"a": job.weight, "b": job.weight.detach(), "row": job.weight.detach()[:10], "tail": job.weight.detach()[990:]}
    staged = stage(tree, overlap=overlap)
    late.set()
    job.step()
    loaded = written(staged)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert {value.unique().item() for value in loaded.values()} == {-1.0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_steps_without_waiting_for_its_parents_copy(job, overlap, late):
    stage(job.tree(), overlap=overlap)
    child = os.fork()
    if child == 0:
        job.step()
        os._exit(0 if job.weight[0].item() == -2.5 else 1)
    assert os.waitpid(child, 0)[1] == 0
    late.set()
