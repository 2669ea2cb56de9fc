"""Two processes with FSDP2: each has, averages and saves a part of every weight."""

import os
import signal
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from trainbus.convert import export_weights
from trainbus.eventloop import Bus, CheckpointDamagedError, CheckpointError, Hook, TrainLoop
from trainbus.eventloop.checkpoint import RemotePath, load, load_whole, sharded, shards, sweep_shards, verify_shards
from trainbus.eventloop.training.saves.write import CheckpointWriter
from trainbus.hooks import CheckpointHook, EMAHook, ExponentialMovingAverage

from ..training.conftest import damage
from . import jobs, meshes


def whole(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in tensors.items()}


class Changes(Hook):
    """May change the state in each validation, so that the last file is written anew after it."""

    def after_val_epoch(self, event: Any) -> None: ...


def train(work_dir: str, epochs: int, resume: str | None, shard: bool = True, *others: Hook) -> Any:
    hook = CheckpointHook(interval=1, max_keep_ckpts=2, save_best="loss")
    loop = jobs.make_loop(work_dir, hook, *others, epochs=epochs, shard=shard)
    loop.run(resume=resume)
    return whole(loop.model.state_dict())


@meshes.AVERAGES
@pytest.mark.long
def test_training_equals_the_single_process_and_resumes_on_2_1_and_2_processes(ranks, tmp_path):
    (single,) = ranks(train, str(tmp_path / "single"), 4, None, False, size=1)
    place = tmp_path / "sharded"
    ranks(train, str(place), 2, None)
    state = load(place / "epoch_2.safetensors")
    directory = place / state["shards"]
    assert {file.name for file in directory.glob("__*")} == {"__0.safetensors", "__1.safetensors"}
    (third,) = ranks(train, str(place), 3, "auto", False, size=1)  # one that shards nothing
    assert third.keys() == single.keys()
    assert load_whole(place / "epoch_2.safetensors")["state_dict"]["0.weight"].shape == (16, 4)
    export_weights(place / "epoch_2.safetensors", tmp_path / "weights.safetensors")
    assert load_file(tmp_path / "weights.safetensors")["0.weight"].shape == (16, 4)
    for resumed in ranks(train, str(place), 4, "auto"):
        torch.testing.assert_close(resumed, single)


@pytest.mark.long
@pytest.mark.parametrize("others", [(), (Changes(),)])
def test_shards_and_their_directories_are_created_and_removed_together(ranks, tmp_path, others):
    ranks(train, str(tmp_path), 4, None, True, *others)
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    assert {"epoch_3.safetensors", "epoch_4.safetensors"} <= files
    named = {load(tmp_path / name)["shards"] for name in files}
    assert {one.name for one in tmp_path.glob("*.shards")} == named
    directory = tmp_path / load(tmp_path / "epoch_4.safetensors")["shards"]
    # Where a hook may change the state in validations, the last file is a second name of the best.
    newest = "best_loss_epoch_4.safetensors" if others else "epoch_4.safetensors"
    assert (tmp_path / "last_checkpoint").read_text() == newest
    assert tmp_path / load(tmp_path / newest)["shards"] == directory
    damage(directory / "__1.safetensors")
    with pytest.raises(CheckpointDamagedError, match=r"__1\.safetensors"):
        verify_shards(load(tmp_path / "epoch_4.safetensors"), tmp_path / "epoch_4.safetensors")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    sweep_shards(tmp_path, still=0)
    assert not list(tmp_path.glob("*.shards"))


STEPS = {
    "makes the directory": (sharded, "make_directory"),
    "writes its part": (sharded.Parts, "_write_part"),
    "writes the file": (sharded.Parts, "_finish"),
}


def stumbles(work_dir: str, rank: int, step: str, dies: bool, on_error: str = "raise") -> Any:
    """Train; in the third save one process fails at one step: by an error, or as a machine that goes away."""
    where, name = STEPS[step]
    do = getattr(where, name)

    def fails(*args: Any, **options: Any) -> Any:
        setattr(where, name, do)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk is full")

    failed: list[str] = []
    loop = jobs.make_loop(work_dir, CheckpointHook(interval=1, on_error=on_error), epochs=4, shard=True)
    if jobs.rank_and_size()[0] == rank:
        arm = partial(setattr, where, name, fails)
        loop.bus.on("checkpoint_staged", lambda event: arm(), priority=0, when=lambda event: event.progress.epoch == 2)
    loop.bus.on("checkpoint_failed", lambda event: failed.append(event.error))
    loop.run()
    return failed


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "step"), [(0, "makes the directory"), (1, "writes its part"), (0, "writes its part"), (0, "writes the file")]
)
@pytest.mark.parametrize("dies", [True, False])
def test_a_save_that_one_process_does_not_finish_is_not_a_checkpoint(outcomes, ranks, tmp_path, rank, step, dies):
    ended = outcomes(stumbles, str(tmp_path), rank, step, dies)
    assert ended[1 - rank].exitcode == 1, ended[1 - rank].output
    assert ended[rank].exitcode == (-signal.SIGKILL if dies else 1)
    if not dies:
        assert all("OSError: the disk is full" in "\n".join([one.error, *one.notes]) for one in ended)
    assert (tmp_path / "last_checkpoint").read_text() == "epoch_2.safetensors"
    assert not (tmp_path / "epoch_3.safetensors").exists()
    if rank == 1:
        assert len(ranks(train, str(tmp_path), 4, "auto")) == 2


@pytest.mark.long
@pytest.mark.parametrize(("rank", "step"), [(0, "makes the directory"), (1, "writes its part"), (0, "writes the file")])
def test_with_logged_save_errors_all_processes_continue_to_the_next_save(ranks, tmp_path, rank, step):
    for failed in ranks(stumbles, str(tmp_path), rank, step, False, "log"):
        assert len(failed) == 1
        assert "OSError: the disk is full" in failed[0]
        assert f"rank {rank}" in failed[0]
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    assert files == {"epoch_1.safetensors", "epoch_2.safetensors", "epoch_4.safetensors"}
    assert load_whole(tmp_path / "epoch_4.safetensors")["progress"]["epoch"] == 4


def restored(work_dir: str, resume: str, shard: bool = True) -> Any:
    """Return the weights and the optimizer's state that a run resumes with, and the random numbers that follow."""
    loop = jobs.make_loop(None, epochs=3, shard=shard)
    seen: list[Any] = []

    @loop.bus.on("before_train")
    def look(event: Any) -> None:
        moments = event.run.optimizers["optimizer"].state_dict()["state"]
        seen.append((whole(loop.model.state_dict()), {index: whole(one) for index, one in moments.items()}))
        event.run.stop("seen")

    loop.run(resume=resume)
    return seen[0]


def assert_restored(found: Any, tree: Any) -> None:
    weights, moments = found
    assert weights.keys() == tree["state_dict"].keys()
    assert all(torch.equal(weights[key], value) for key, value in tree["state_dict"].items())
    saved = tree["optimizer"]["optimizer"]["state"]
    assert moments.keys() == saved.keys()
    assert all(torch.equal(moments[index][key], value) for index, one in saved.items() for key, value in one.items())


@pytest.mark.long
@pytest.mark.parametrize("place", ["", "local://"], ids=["disk", "store"])
def test_a_save_of_2_processes_is_bitwise_the_same_on_1_3_and_4(ranks, tmp_path, place):
    ranks(trained, f"{place}{tmp_path}", {})
    path = f"{place}{tmp_path}/epoch_2.safetensors"
    tree = load_whole(path)
    for size in (1, 3, 4):
        for found in ranks(restored, str(tmp_path), path, size > 1, size=size):
            assert_restored(found, tree)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sharded_checkpoint_of_0_2_resumes_with_the_same_values(ranks, size):
    old = Path(__file__).parent / "old_files"
    tree = load(old / "sharded-0.2-whole.safetensors")
    for found in ranks(restored, "", str(old / "sharded-0.2" / "epoch_2.safetensors"), size > 1, size=size):
        assert_restored(found, tree)


def trained(out_dir: str, options: dict[str, Any]) -> Any:
    hook = CheckpointHook(interval=1, max_keep_ckpts=1, out_dir=out_dir, **options)
    loop = jobs.make_loop(None, hook, epochs=2, shard=True)
    loop.run()
    return whole(loop.model.state_dict())


def resumed(directory: str) -> Any:
    """Return the iteration that a run resumes at, and the parts that this rank has verified."""
    loop = jobs.make_loop(None, epochs=3, shard=True)
    verify, verified, at = shards.verify, [], []

    def seen(path: Any) -> None:
        verified.append(path.name)
        verify(path)

    shards.verify = seen

    @loop.bus.on("before_train")
    def look(event: Any) -> None:
        at.append(event.progress.iter)
        event.run.stop("seen")

    loop.run(resume=directory)
    return at[0], verified


@pytest.mark.long
def test_each_rank_verifies_some_parts_and_all_skip_a_checkpoint_with_a_damaged_one(ranks, tmp_path):
    ranks(train, str(tmp_path), 2, None)
    for rank, found in enumerate(ranks(resumed, str(tmp_path))):
        assert found == (16, [f"__{rank}.safetensors"])
    state = load(tmp_path / "epoch_2.safetensors")
    damage(tmp_path / state["shards"] / "__1.safetensors")
    for rank, found in enumerate(ranks(resumed, str(tmp_path))):
        assert found == (8, [f"__{rank}.safetensors"] * 2)


def refuse(*texts: str, rank: int | None = None) -> None:
    """Have stores refuse paths with one of these texts, on one rank or on all."""
    upload = RemotePath.upload

    def refuses(self: RemotePath, *args: Any, **options: Any) -> None:
        if any(text in str(self) for text in texts) and rank in (None, jobs.rank_and_size()[0]):
            raise CheckpointError("the store does not answer")
        upload(self, *args, **options)

    RemotePath.upload = refuses  # type: ignore[method-assign]


def told_of(out_dir: str, texts: tuple[str, ...], rank: int | None, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Train with a store that refuses something; return the outcomes that were told on this rank."""
    refuse(*texts, rank=rank)
    loop = jobs.make_loop(None, CheckpointHook(interval=1, out_dir=out_dir, **options), epochs=3, shard=True)
    told: list[tuple[str, str]] = []
    for name in ("uploaded", "failed", "skipped"):
        loop.bus.on(f"checkpoint_{name}", lambda event, name=name: told.append((name, Path(event.path).stem)))
    loop.run()
    return told


@pytest.mark.long
def test_a_store_that_refuses_a_part_of_a_sharded_save_ends_no_run(ranks, tmp_path):
    for told in ranks(told_of, f"local://{tmp_path}", ("/epoch_2-",), 1, {"max_keep_ckpts": 1}):
        assert told[:2] == [("uploaded", "epoch_1"), ("failed", "epoch_2")]
        assert told[-1] == ("uploaded", "epoch_3")
    assert {file.stem for file in tmp_path.glob("*.safetensors")} == {"epoch_3"}
    assert load_whole(tmp_path / "epoch_3.safetensors")["progress"]["epoch"] == 3


@pytest.mark.long
def test_a_store_that_refuses_a_second_name_of_a_sharded_save_has_the_others(outcomes, tmp_path):
    options = {"save_best": "loss"}
    for one in outcomes(told_of, f"local://{tmp_path}", ("best_loss_epoch_3.",), None, options):
        assert "best_loss_epoch_3.safetensors by the end of the run" in one.error
    assert {f"epoch_{n}" for n in (1, 2, 3)} <= {file.stem for file in tmp_path.glob("*.safetensors")}


def in_two_stores(one: str, other: str) -> None:
    """Train with a store that takes nothing, and another one that takes the last save."""
    first, second = CheckpointHook(interval=1, out_dir=f"local://{one}"), CheckpointHook(out_dir=f"local://{other}", name="b")
    refuse(f"local://{one}")
    loop = jobs.make_loop(None, first, second, Changes(), epochs=1, shard=True)
    loop.run()


@pytest.mark.long
def test_a_store_that_has_the_last_sharded_save_does_not_hide_one_that_lacks_it(outcomes, tmp_path):
    for one in outcomes(in_two_stores, str(tmp_path / "one"), str(tmp_path / "other")):
        assert one.exitcode == 1
        assert "the store does not answer" in one.error
    assert load_whole(tmp_path / "other/epoch_1.safetensors")["progress"]["epoch"] == 1


@pytest.mark.long
def test_a_run_whose_last_sharded_save_a_store_refuses_fails_at_its_end(outcomes, tmp_path):
    for one in outcomes(told_of, f"local://{tmp_path}", ("/epoch_3-",), 1, {}):
        assert one.exitcode == 1
        assert "rank 1: CheckpointError: the store does not answer" in one.error
    assert load_whole(tmp_path / "epoch_2.safetensors")["progress"]["epoch"] == 2


def in_two_directories(one: str, other: str) -> Any:
    second = CheckpointHook(interval=2, out_dir=other, filename_tmpl="at_{}.safetensors")
    second.name = "second"
    jobs.make_loop(None, CheckpointHook(interval=1, out_dir=one), second, epochs=2, shard=True).run()


@pytest.mark.long
def test_each_directory_of_a_sharded_save_has_all_its_parts(ranks, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    ranks(in_two_directories, str(one), f"local://{other}")
    here, there = load_whole(one / "epoch_2.safetensors"), load_whole(other / "at_2.safetensors")
    assert here["state_dict"].keys() == there["state_dict"].keys()
    assert all(torch.equal(value, there["state_dict"][key]) for key, value in here["state_dict"].items())


def refused_in_the_store(here: str, store: str) -> None:
    """Save to a store that does not take what rank 1 has after epoch 2, and on disk."""
    first, second = (
        CheckpointHook(interval=1, out_dir=f"local://{store}", max_keep_ckpts=1),
        CheckpointHook(interval=1, out_dir=here, name="disk"),
    )
    refuse("/epoch_2-", rank=1)
    jobs.make_loop(None, first, second, epochs=3, shard=True).run()


@pytest.mark.long
def test_a_store_that_refuses_a_sharded_save_costs_no_file_on_disk(ranks, tmp_path):
    here, store = tmp_path / "here", tmp_path / "store"
    ranks(refused_in_the_store, str(here), str(store))
    assert load_whole(here / "epoch_2.safetensors")["progress"]["epoch"] == 2
    assert {file.stem for file in store.glob("*.safetensors")} == {"epoch_3"}
    assert load_whole(store / "epoch_3.safetensors")["progress"]["epoch"] == 3


@pytest.mark.long
def test_a_store_that_each_process_has_for_itself_takes_no_sharded_save(outcomes):
    for one in outcomes(trained, "memory://apart", {}):
        assert one.exitcode == 1
        assert "__1.safetensors" in one.error


@pytest.mark.long
def test_in_a_store_old_parts_are_removed_with_their_checkpoints(ranks, tmp_path):
    ranks(trained, f"local://{tmp_path}/store", {"save_best": "loss"})
    place = tmp_path / "store"
    named = {load(file)["shards"] for file in place.glob("*.safetensors")}
    assert {one.name for one in place.iterdir() if one.is_dir()} == named
    assert "epoch_2.safetensors" in {file.name for file in place.glob("*.safetensors")}


def saves_in_turn(out_dir: str, options: dict[str, Any], slow: int) -> Any:
    """Save after each iteration; rank ``slow`` begins its parts late. Return the outcomes, and the weights at each save."""
    hook = CheckpointHook(interval=1, by_epoch=False, out_dir=out_dir, max_keep_ckpts=-1, **options)
    loop = jobs.make_loop(None, hook, epochs=2, shard=True)
    told: list[tuple[str, str]] = []
    for outcome in ("committed", "skipped", "failed"):
        loop.bus.on(f"checkpoint_{outcome}", lambda event, outcome=outcome: told.append((outcome, Path(event.path).stem)))
    if jobs.rank_and_size()[0] == slow:
        write = sharded.Parts._write_part

        def late(self: Any, directory: Any) -> Any:
            time.sleep(0.2 if "busy" in options else 0.01)
            return write(self, directory)

        sharded.Parts._write_part = late
    weights: dict[str, Any] = {}

    @loop.bus.on("after_train_iter", priority="LOWEST")
    def keep(event: Any) -> None:
        weights[f"iter_{event.progress.iter + 1}"] = whole(loop.model.state_dict())

    loop.run()
    return sorted(told), weights


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "slow"),
    [({"busy": "replace"}, 0), ({"busy": "replace"}, 1), ({"busy": "skip"}, 0), ({"staging": "overlap"}, 1)],
    ids=str,
)
def test_every_save_of_a_sharded_state_is_whole_and_told_alike_on_all_ranks(ranks, tmp_path, options, slow):
    (told, weights), (others, _) = ranks(saves_in_turn, str(tmp_path), options, slow)
    assert told == others
    outcomes = {name: outcome for outcome, name in reversed(told)}
    last = f"iter_{len(weights)}"
    assert len(outcomes) >= len(told) - (("skipped", last) in told)  # after that the run saves its end, and waits
    assert "failed" not in outcomes.values()
    assert ("skipped" in outcomes.values()) == ("busy" in options)
    committed = {name for name, outcome in outcomes.items() if outcome == "committed"}
    assert committed == {file.stem for file in tmp_path.glob("iter_*.safetensors")}
    assert last in committed
    for name in committed:
        state = load_whole(tmp_path / f"{name}.safetensors")["state_dict"]
        assert all(torch.equal(state[key], value) for key, value in weights[name].items())


class Names(Hook):
    """Save after each epoch, and after the second validation the same state in another directory."""

    observes = True

    def __init__(self, one: str, other: str) -> None:
        self.one, self.other = Path(one), Path(other)
        self.reached: dict[str, Event] = defaultdict(Event)

    def after_train_epoch(self, event: Any) -> None:
        if event.progress.epoch == 2 and event.run.rank == 1:
            self.reached["a1 begins"].wait(20)
        event.run.checkpoints.save(f"a{event.progress.epoch}.safetensors", directory=self.one, busy="replace")

    def after_val_epoch(self, event: Any) -> None:
        if event.progress.epoch == 2:
            event.run.checkpoints.save("best.safetensors", directory=self.other, busy="replace")

    def checkpoint_staged(self, event: Any) -> None:
        self.reached[Path(event.path).stem].set()

    def checkpoint_committed(self, event: Any) -> None:
        if Path(event.path).stem == "a0" and jobs.rank_and_size()[0] == 0:
            self.reached["a2"].wait(20)


def named_twice(one: str, other: str) -> None:
    """Let the second save have another name, and begin on rank 1 alone, before the third one would replace it."""
    names = Names(one, other)
    commit, write = sharded.Parts.commit, sharded.Parts._write_part

    def commits(self: Any, beside: Any, write: Any, **options: Any) -> Any:
        names.reached[f"{beside.stem} begins"].set()
        return commit(self, beside, write, **options)

    def writes(self: Any, directory: Any) -> Any:
        if directory.name.startswith("a0-"):
            names.reached["best"].wait(20)
        return write(self, directory)

    sharded.Parts.commit, sharded.Parts._write_part = commits, writes
    jobs.make_loop(None, names, epochs=3, shard=True).run()


@pytest.mark.long
def test_ranks_write_a_save_that_is_not_replaced_before_its_other_name(ranks, tmp_path):
    ranks(named_twice, str(tmp_path / "one"), str(tmp_path / "other"))
    trees = {file.stem: load_whole(file)["progress"]["epoch"] for file in tmp_path.glob("*/*.safetensors")}
    assert trees == {"a0": 1, "a1": 2, "best": 2, "a2": 3}


class Again(Hook):
    """Save in two directories, and after the validation once more in the second one."""

    observes = True

    def __init__(self, one: str, other: str, late: int) -> None:
        self.places, self.late = (Path(one), Path(other)), late

    def after_train_epoch(self, event: Any) -> None:
        self.save(event.run, self.places)

    def after_val_epoch(self, event: Any) -> None:
        if event.run.rank != self.late:
            event.run.checkpoints.wait()
        self.save(event.run, self.places[1:])

    def save(self, run: Any, places: Any) -> None:
        for place in places:
            run.checkpoints.save("a.safetensors", directory=place, on_error="log")


def failed_and_again(one: str, other: str, late: int) -> None:
    """Let the second directory fail once; rank ``late`` notes that after it has been asked for the file again."""
    loop = jobs.make_loop(None, Again(one, other, late), epochs=1, shard=True)
    link, report, tries, staged = sharded.Parts._link_part, CheckpointWriter._report, [], []
    again = Event()

    def fails(self: Any, directory: Any) -> Any:
        tries.append(directory)
        if len(tries) == 1:
            raise CheckpointError("the disk is full")
        return link(self, directory)

    def notes(self: Any, *args: Any, **options: Any) -> Any:
        if jobs.rank_and_size()[0] == late:
            again.wait(10)
        return report(self, *args, **options)

    def count(event: Any) -> None:
        staged.append(event.path)
        if len(staged) == 2:
            again.set()

    sharded.Parts._link_part, CheckpointWriter._report = fails, notes
    loop.bus.on("checkpoint_staged", count)
    loop.run()


@pytest.mark.long
@pytest.mark.parametrize("late", [0, 1])
def test_all_ranks_write_a_file_again_that_one_of_them_knows_has_failed(ranks, tmp_path, late):
    ranks(failed_and_again, str(tmp_path / "one"), str(tmp_path / "other"), late)
    assert load_whole(tmp_path / "other/a.safetensors")["progress"]["epoch"] == 1


class Tied(torch.nn.Module):
    """An embedding whose weight is that of the output, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.output = torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 1000, bias=False)
        self.output.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.output(self.words(words))


def tied(work_dir: str, epochs: int, resume: str | None) -> Any:
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    loop = TrainLoop(
        model,
        torch.optim.AdamW(model.parameters()),
        step=lambda model, words: model(words).square().mean(),
        train_data=[torch.arange(9)] * 2,
        bus=Bus(CheckpointHook(interval=1)),
        max_epochs=epochs,
        work_dir=work_dir,
    )
    loop.run(resume=resume)
    return whole(model.state_dict())


@pytest.mark.long
def test_tied_weights_are_stored_once_and_stay_tied(ranks, tmp_path):
    begun, _ = ranks(tied, str(tmp_path), 1, None)
    state = load_whole(tmp_path / "epoch_1.safetensors")["state_dict"]
    assert torch.equal(state["words.weight"], begun["words.weight"])
    assert state["output.weight"] is state["words.weight"]
    (directory,) = tmp_path.glob("*.shards")
    assert sum(part.stat().st_size for part in directory.glob("__*")) < 4 * begun["words.weight"].nbytes  # with its moments
    resumed, _ = ranks(tied, str(tmp_path), 2, "auto")
    straight, _ = ranks(tied, str(tmp_path / "straight"), 2, None)
    torch.testing.assert_close(resumed, straight)


class Validated(Hook):
    """What the model and the average have in validations, and after them."""

    priority = 100
    observes = True

    def __init__(self, ema: EMAHook) -> None:
        self.ema = ema
        self.losses: list[float] = []
        self.seen: dict[str, torch.Tensor] = {}
        self.kept: dict[str, torch.Tensor] = {}

    def before_val_iter(self, event: Any) -> None:
        self.seen = whole(event.run.model.state_dict())  # also of a model that a forward pass has made whole
        self.kept = whole(self.ema.average.tensors)

    def after_val_epoch(self, event: Any) -> None:
        self.losses.append(event.metrics["loss"])


def average(work_dir: str, epochs: int, resume: str | None, shard: bool) -> Any:
    ema = EMAHook(momentum=0.1)
    watch = Validated(ema)
    loop = jobs.make_loop(work_dir, ema, watch, CheckpointHook(interval=1), epochs=epochs, shard=shard)
    loop.run(resume=resume)
    return watch.losses, whole(loop.model.state_dict()), whole(ema.average.tensors), watch.seen, watch.kept


@meshes.AVERAGES
@pytest.mark.long
def test_sharded_averages_equal_those_of_one_process_in_validation_and_after_resuming(ranks, tmp_path):
    same = torch.testing.assert_close
    ((losses, raw, averaged, _, _),) = ranks(average, str(tmp_path / "single"), 4, None, False, size=1)
    assert not torch.equal(raw["0.weight"], averaged["0.weight"])
    place = tmp_path / "sharded"
    begun = ranks(average, str(place), 2, None, True)
    file = load_whole(place / "epoch_2.safetensors")
    for told, weights, averages, validated, kept in begun:
        assert told == pytest.approx(losses[:2], rel=1e-5)
        same(validated, averages)
        same(kept, weights)  # and given back
        same(dict(file["state_dict"]), averages)
        same(dict(file["ema_state_dict"]), weights)
    (alone,) = ranks(average, str(place), 3, "auto", False, size=1)
    assert alone[0] == pytest.approx(losses[1:3], rel=1e-5)  # the checkpoint was made before the second validation
    for told, weights, averages, _, _ in ranks(average, str(place), 4, "auto", True):
        assert told == pytest.approx(losses[2:], rel=1e-5)
        same(weights, raw)
        same(averages, averaged)


@pytest.fixture
def linear(tmp_path: Any) -> Any:
    """A model with a weight that is sharded, over one process."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = torch.nn.Linear(3, 2)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    yield model
    distributed.destroy_process_group()


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
def test_ctrl_c_during_an_exchange_restores_sharded_weights(linear, monkeypatch, copies):
    average = ExponentialMovingAverage(linear, momentum=0.5)
    average.update_parameters(linear)
    raw = linear.weight.full_tensor().clone()
    with torch.no_grad():
        linear.weight.mul_(3)
        average.update_parameters(linear)
    held = average.tensors["weight"].full_tensor().clone()
    torch.testing.assert_close(held, 2 * raw)
    made, copy = [], torch.Tensor.copy_

    def struck(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made.append(copy(self, other))
        if len(made) == copies + 1:
            raise KeyboardInterrupt
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "copy_", struck)
    with pytest.raises(KeyboardInterrupt):
        average.swap(linear)
        torch.testing.assert_close(linear.weight.full_tensor(), held)
        average.restore(linear)
    monkeypatch.undo()
    average.restore(linear)
    assert isinstance(linear.weight, DTensor)
    torch.testing.assert_close(linear.weight.full_tensor(), 3 * raw)
    torch.testing.assert_close(average.tensors["weight"].full_tensor(), held)
    assert not average.swapped


def in_two_dimensions(work_dir: str, kind: str, resume: str | None) -> Any:
    """Save, or resume, with replicas of shards (HSDP), or with parts of parts (tensor parallel); return the weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = jobs.network()
    if kind == "replicas":
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
        fully_shard(model, mesh=mesh["outer"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bus = Bus(CheckpointHook(interval=1))
    data = DataLoader(jobs.loader(shuffle=False).dataset, batch_size=8)  # the processes of one group need the same
    loop = TrainLoop(model, optimizer, step=jobs.step, train_data=data, bus=bus, max_epochs=1, work_dir=work_dir)
    loop.run(resume=resume)
    state = {index: whole(one) for index, one in optimizer.state_dict()["state"].items()}
    return whole(model.state_dict()), state


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("replicas", marks=meshes.AVERAGES), "parts of parts"])
def test_meshes_of_two_dimensions_save_each_element_once_and_get_it_back(ranks, tmp_path, kind):
    saved = ranks(in_two_dimensions, str(tmp_path), kind, None, size=4)
    tree = load_whole(tmp_path / "epoch_1.safetensors")
    (directory,) = tmp_path.glob("*.shards")
    stored = sum(tensor.nbytes for part in directory.glob("__*") for tensor in load(part).values())
    assert stored == 3 * sum(value.nbytes for value in tree["state_dict"].values())  # with the moments of AdamW
    for found in (*saved, *ranks(in_two_dimensions, str(tmp_path / "other"), kind, str(tmp_path), size=4)):
        assert_restored(found, tree)
