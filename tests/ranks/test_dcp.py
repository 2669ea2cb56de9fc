"""Checkpoints become folders of torch.distributed.checkpoint and the reverse, on 2, 1 and 4 processes, with the same bits."""

import logging
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainbus.cli import main
from trainbus.convert import copy_in
from trainbus.eventloop import Bus, Hook, TrainLoop
from trainbus.eventloop.checkpoint import load, load_whole
from trainbus.hooks import CheckpointHook, EMAHook

from ..checkpoint.trees import canonical
from . import jobs
from .test_sharded import whole

pytestmark = pytest.mark.long

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def parts(*, warm: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is sharded if there are processes to share it, and its optimizer."""
    model = jobs.network()
    size = jobs.rank_and_size()[1]
    if size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.99))
    if warm:
        batches = iter(jobs.loader(shuffle=False))
        for _ in range(3):
            jobs.step(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """All of both, whole, as plain values."""
    _, state = get_state_dict(model, optimizer)
    named = {name: whole(one) for name, one in state["state"].items()}
    return canonical([whole(model.state_dict()), named, state["param_groups"]])


def engine_saves(folder: str, flat: bool) -> Any:
    model, optimizer = parts(warm=True)
    weights, state = get_state_dict(model, optimizer, options=FLAT if flat else None)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return values(model, optimizer)


def engine_loads(folder: str, flat: bool) -> Any:
    model, optimizer = parts()
    weights, state = get_state_dict(model, optimizer, options=FLAT if flat else None)
    tree = {"model": weights, "optimizer": state}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process has no group
        dcp.load(tree, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])
    return values(model, optimizer)


def we_resume(path: str, shard: bool, *hooks: Hook) -> Any:
    loop = jobs.make_loop(None, *hooks, epochs=1000, shard=shard)
    seen: list[Any] = []

    @loop.bus.on("before_train")
    def look(event: Any) -> None:
        seen.append(values(event.run.model, event.run.optimizers["optimizer"]))
        event.run.stop("seen")

    loop.run(resume=path)
    return seen[0]


def command(*words: object) -> None:
    assert main(["checkpoint", *map(str, words)]) == 0


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("most", [copy_in.ONE_FILE.value, 0], ids=["one file", "sharded"])
def test_from_an_engine_to_us_and_back_on_2_1_and_4_processes(ranks, tmp_path, change, flat, most):
    change(copy_in.ONE_FILE, most)
    (theirs, *others) = ranks(engine_saves, str(tmp_path / "theirs"), flat)
    assert others == [theirs]
    ours = tmp_path / "ours.safetensors"
    command("import", tmp_path / "theirs", ours)
    assert load(ours)["progress"]["iter"] == 3
    for size in (1, 4):
        assert ranks(we_resume, str(ours), size > 1, size=size) == [theirs] * size
    command("export", ours, tmp_path / "again", "--dcp")
    for size in (1, 4):
        assert ranks(engine_loads, str(tmp_path / "again"), False, size=size) == [theirs] * size
    command("import", tmp_path / "again", tmp_path / "back.safetensors")
    assert canonical(load_whole(tmp_path / "back.safetensors")) == canonical(load_whole(ours))


def we_train(work_dir: str, shard: bool) -> Any:
    loop = jobs.make_loop(work_dir, CheckpointHook(interval=1), EMAHook(momentum=0.5), epochs=1, shard=shard)
    seen: list[Any] = []
    loop.bus.on("after_train", lambda event: seen.append(values(loop.model, event.run.optimizers["optimizer"])))
    loop.run()
    return seen[0]


@pytest.mark.parametrize("size", [1, 2])
def test_from_us_to_an_engine_and_back_on_2_1_and_4_processes(ranks, tmp_path, size):
    work = tmp_path / "ours"
    (trained, *_) = ranks(we_train, str(work), size > 1, size=size)
    ours = work / "epoch_1.safetensors"
    command("export", ours, tmp_path / "theirs", "--dcp", "--raw")
    for count in (1, 2, 4):
        assert ranks(engine_loads, str(tmp_path / "theirs"), False, size=count) == [trained] * count
    command("import", tmp_path / "theirs", tmp_path / "back.safetensors")
    assert canonical(load_whole(tmp_path / "back.safetensors")) == canonical(load_whole(ours))
    for count in (1, 4):
        resumed = ranks(we_resume, str(tmp_path / "back.safetensors"), count > 1, EMAHook(momentum=0.5), size=count)
        assert resumed == [trained] * count


def half_sharded(path: str | None, work_dir: str | None, backwards: bool) -> Any:
    """Train a model of which one of two equal layers is sharded; return its values after the last step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (jobs.rank_and_size()[1],)))
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters[::-1] if backwards else parameters, lr=0.01)
    hooks = [CheckpointHook(interval=1)] if work_dir else []
    data, limit = [torch.linspace(-1, 1, 16).view(4, 4)] * 3, 2 if path else 1
    step = lambda model, batch: (model(batch) * torch.arange(4.0)).sum()  # noqa: E731
    loop = TrainLoop(model, optimizer, step=step, train_data=data, bus=Bus(*hooks), max_epochs=limit, work_dir=work_dir)
    loop.run(resume=path)
    moments = {name: whole(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    return canonical([whole(model.state_dict()), moments])


def test_sharded_state_is_found_by_name_where_the_optimizer_has_another_order(ranks, tmp_path):
    ranks(half_sharded, None, str(tmp_path), False)
    saved = str(tmp_path / "epoch_1.safetensors")
    assert ranks(half_sharded, saved, None, True) == ranks(half_sharded, saved, None, False)


# ----------------------------------------------------------------------------------------------------------- torchtitan


def manager(folder: Path, step: int) -> Any:
    """What torchtitan saves, of our model, by its own classes."""
    checkpoint = pytest.importorskip("torchtitan.components.checkpoint")
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    model, _ = parts()
    config = default_adamw(lr=0.01)
    config.implementation = "foreach"
    optimizers = config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=100)
    options = {"enable": True, "folder": "checkpoint", "interval": 1, "keep_latest_k": 0}
    options |= {"last_save_model_only": False, "exclude_from_loading": ["dataloader"]}
    made = checkpoint.CheckpointManager.Config(**options).build(
        dataloader=Loader(),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": Counts(step)},
        sd_adapter=None,
        base_folder=str(folder),
    )
    return made, model, optimizers, schedulers


class Counts:
    """The part of torchtitan's trainer that is saved."""

    def __init__(self, step: int) -> None:
        self.step, self.ntokens_seen = step, 100 * step

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Loader:
    """As torchtitan's saves its place: as a pickle of each rank."""

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{distributed.get_rank()}": pickle.dumps({"at": 3}), "world_size": distributed.get_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it is excluded from loading")


def go_on(model: nn.Module, optimizers: Any, schedulers: Any, steps: int) -> Any:
    batches = iter(jobs.loader(shuffle=False))
    for _ in range(steps):
        jobs.step(model, next(batches)).backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
    state = {key: one.full_tensor() if hasattr(one, "full_tensor") else one for key, one in optimizers.state_dict().items()}
    return canonical([whole(model.state_dict()), state, schedulers.state_dict()])


def torchtitan_saves(folder: str) -> Any:
    made, *parts = manager(Path(folder), 3)
    go_on(*parts, steps=3)
    made.save(3)
    made.close()
    return go_on(*parts, steps=0)


def torchtitan_loads(folder: str) -> Any:
    made, *parts = manager(Path(folder), 0)
    assert made.load(step=3)
    made.close()
    return go_on(*parts, steps=0), vars(made.states["train_state"])


def test_torchtitans_checkpoints_are_ours_and_ours_are_torchtitans(ranks, tmp_path):
    pytest.importorskip("torchtitan")
    (theirs, *_) = ranks(torchtitan_saves, str(tmp_path))
    ours = tmp_path / "ours.safetensors"
    command("import", tmp_path / "checkpoint" / "step-3", ours)
    assert load(ours)["progress"]["update"] == 3
    weights, moments, _ = theirs[1]
    for size in (1, 4):
        for resumed in ranks(we_resume, str(ours), size > 1, size=size):
            assert resumed[1][0] == weights
    (tmp_path / "again" / "checkpoint").mkdir(parents=True)
    command("export", ours, tmp_path / "again" / "checkpoint" / "step-3", "--dcp", "--torchtitan")
    for size in (2, 4):
        for loaded, counts in ranks(torchtitan_loads, str(tmp_path / "again"), size=size):
            assert loaded == theirs
            assert counts == {"step": 3, "ntokens_seen": 300}
    assert moments


def test_torchtitan_goes_on_from_a_run_of_ours(ranks, tmp_path):
    pytest.importorskip("torchtitan")
    (trained, *_) = ranks(we_train, str(tmp_path / "ours"), True)
    ours = tmp_path / "ours" / "epoch_1.safetensors"
    steps = load(ours)["progress"]["update"]
    folder = tmp_path / "theirs" / "checkpoint"
    folder.mkdir(parents=True)
    command("export", ours, folder / "step-3", "--dcp", "--torchtitan", "--raw")
    for loaded, counts in ranks(torchtitan_loads, str(tmp_path / "theirs")):
        assert loaded[1][0] == trained[1][0]
        assert loaded[1][2] == canonical({"last_epoch": steps})
        assert counts["step"] == steps


# ----------------------------------------------------------------------------------------------------------- accelerate


def accelerates(folder: str, saves: bool) -> Any:
    """What Accelerate does in ``save_state`` and ``load_state``, which shard nothing without a GPU."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp_utils

    fsdp_utils.logger = logging.getLogger(__name__)  # its own wants an Accelerator
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    rank, size = jobs.rank_and_size()
    accelerator = SimpleNamespace(process_index=rank, num_processes=size, is_fsdp2=True, wait_for_everyone=distributed.barrier)
    accelerator.is_main_process = rank == 0
    model, optimizer = parts(warm=saves)
    of_model, of_optimizer = (plugin, accelerator, model, folder), (plugin, accelerator, optimizer, model, folder)
    if saves:
        fsdp_utils.save_fsdp_model(*of_model)
        fsdp_utils.save_fsdp_optimizer(*of_optimizer)
    else:
        fsdp_utils.load_fsdp_model(*of_model)
        fsdp_utils.load_fsdp_optimizer(*of_optimizer)
    return values(model, optimizer)


def test_accelerates_checkpoints_are_ours_and_ours_are_accelerates(ranks, tmp_path):
    pytest.importorskip("accelerate")
    theirs = tmp_path / "theirs"
    (saved, *_) = ranks(accelerates, str(theirs), True)
    assert {path.name for path in theirs.iterdir()} == {"pytorch_model_fsdp_0", "optimizer_0"}
    ours = tmp_path / "ours.safetensors"
    command("import", theirs, ours)
    assert ranks(we_resume, str(ours), False, size=1) == [saved]
    again = tmp_path / "again"
    again.mkdir()
    command("export", ours, again / "both", "--dcp")
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (again / name).symlink_to("both")
    for size in (2, 4):
        assert ranks(accelerates, str(again), False, size=size) == [saved] * size
