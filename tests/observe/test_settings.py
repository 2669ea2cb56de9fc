"""What a run records by itself, without ``config=``."""

from typing import Annotated, Any

import torch
from msgspec import Meta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from trainbus.eventloop import Bus, GlobalBatchSampler, Hook, check_options
from trainbus.eventloop.plain import HIDDEN
from trainbus.hooks import CheckpointHook, OptimizerHook, ParamSchedulerHook
from trainbus.observe import RunFolder, RunRecordHook

from ..hooks.conftest import batches, make_loop, own_loop, small_model


def settings(folder) -> dict[str, Any]:
    return RunFolder(folder).manifest().sessions[-1].settings


def samples(number: int = 8) -> TensorDataset:
    return TensorDataset(torch.ones(number, 3), torch.zeros(number, dtype=torch.long))


def test_a_run_records_its_settings_by_itself(tmp_path):
    make_loop(RunRecordHook(), work_dir=tmp_path, seed=3, train_data=DataLoader(samples(), batch_size=2)).run()
    found = settings(tmp_path)
    expected = {"lr": 0.1, "optimizer": "SGD", "optimizer.momentum": 0.9, "batch_size": 2, "max_epochs": 2, "seed": 3}
    model = {"model": "Sequential", "parameters": 42, "trainable": 42, "precision": "float32", "device": "cpu", "world_size": 1}
    assert found | expected | model == found


def test_parameter_groups_and_several_optimizers_have_names_of_their_own(tmp_path):
    model = small_model()
    slow, fast = [*model[0].parameters()], [*model[2].parameters()]
    optimizer = torch.optim.AdamW([{"params": slow, "lr": 0.01}, {"params": fast, "lr": 0.1}], weight_decay=0.5)
    own_loop(Bus(RunRecordHook()), model, optimizer, work_dir=tmp_path / "groups")
    found = settings(tmp_path / "groups")
    assert (found["lr"], found["optimizer.groups"], found["optimizer.1.lr"], found["optimizer.weight_decay"]) == (
        0.01,
        2,
        0.1,
        0.5,
    )
    assert "optimizer.1.weight_decay" not in found  # the same as in the first group
    own_loop(Bus(RunRecordHook()), model, None, work_dir=tmp_path / "none")
    assert not any("optimizer" in name or name == "lr" for name in settings(tmp_path / "none"))
    two = {"gen": torch.optim.SGD(slow, lr=0.3), "disc": torch.optim.Adam(fast, lr=0.4)}
    make_loop(RunRecordHook(), model=model, optimizer=two, work_dir=tmp_path / "two").run()
    found = settings(tmp_path / "two")
    assert (found["optimizer.gen"], found["optimizer.disc"], found["optimizer.disc.lr"], found["lr"]) == (
        "SGD",
        "Adam",
        0.4,
        0.3,
    )


def test_the_loader_of_a_loop_of_ones_own_counts_from_its_first_epoch_on(tmp_path):
    own_loop(Bus(RunRecordHook()), small_model(), work_dir=tmp_path)
    assert settings(tmp_path)["batch_size"] == 4


def test_a_global_batch_is_recorded_with_the_share_of_a_process(tmp_path):
    data = samples(16)
    loader = DataLoader(data, batch_sampler=GlobalBatchSampler(data, 8, batch_size=4))
    make_loop(RunRecordHook(), OptimizerHook(accumulate=2), work_dir=tmp_path, train_data=loader).run()
    found = settings(tmp_path)
    assert (found["global_batch"], found["batch_size"], found["accumulate"]) == (8, 4, 2)


def test_a_schedule_is_recorded_with_its_options_and_the_rate_that_it_starts_from(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
    make_loop(
        RunRecordHook(), ParamSchedulerHook(schedule, by="iter"), model=model, optimizer=optimizer, work_dir=tmp_path
    ).run()
    found = settings(tmp_path)
    assert (found["lr"], found["schedule"], found["schedule.start_factor"]) == (0.1, "LinearLR", 0.5)
    assert "schedule.last_epoch" not in found


def test_mixed_precision_is_recorded(tmp_path):
    make_loop(RunRecordHook(), OptimizerHook(amp="bf16"), work_dir=tmp_path).run()
    assert settings(tmp_path)["precision"] == "bf16"


class Mine(Hook):
    """A hook without ``@check_options``."""

    def __init__(self, strength: float, *, schedule: Any = None, lost: int = 2) -> None:
        self._strength, self.schedule = strength, schedule

    def after_train_iter(self, event: Any) -> None: ...


class Checked(Hook):
    """A hook with ``@check_options``, and a secret."""

    @check_options
    def __init__(self, every: Annotated[int, Meta(ge=1)], *, api_key: str, to: str = "x", **rest: Any) -> None:
        self.unrelated = every

    def after_train_iter(self, event: Any) -> None: ...


def test_the_options_of_all_hooks_are_recorded_with_their_defaults_and_without_secrets(tmp_path):
    url = "https://ada:pw@example.org/x"
    hooks = Mine(0.5, schedule=StepLR), Checked(3, api_key="s3cr3t", to=url, more=[1]), CheckpointHook(interval=2)
    make_loop(RunRecordHook(), *hooks, work_dir=tmp_path).run()
    found = {name.removeprefix("hooks."): value for name, value in settings(tmp_path).items() if name.startswith("hooks.")}
    expected = {"Mine.strength": 0.5, "Mine.schedule": "StepLR", "Checked.every": 3, "Checked.more": [1]}
    assert found | expected | {"CheckpointHook.interval": 2, "CheckpointHook.by_epoch": True} == found
    assert (found["Checked.api_key"], found["Checked.to"]) == (HIDDEN, f"https://example.org/{HIDDEN}")
    assert "Mine.lost" not in found  # it is not known which value the hook was given
    assert b"s3cr3t" not in (tmp_path / "run.json").read_bytes()


def test_two_hooks_of_one_kind_are_told_apart(tmp_path):
    make_loop(RunRecordHook(), Mine(1.0), Mine(2.0), work_dir=tmp_path).run()
    found = settings(tmp_path)
    assert (found["hooks.Mine.strength"], found["hooks.Mine-2.strength"]) == (1.0, 2.0)


def test_what_cannot_be_read_is_left_out_and_ends_no_run(tmp_path, logs):
    class Loader(list):
        @property
        def batch_size(self):
            raise RuntimeError("not yet")

    make_loop(RunRecordHook(), work_dir=tmp_path, train_data=Loader(batches())).run()
    assert settings(tmp_path)["lr"] == 0.1
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert [line["part"] for line in warnings] == ["data"]  # once, and not in each epoch


def test_secrets_in_the_configuration_are_not_stored(tmp_path):
    make_loop(RunRecordHook(), work_dir=tmp_path, config={"hub": {"token": "s3cr3t"}, "a": 1}).run()
    assert RunFolder(tmp_path).manifest().config == {"hub": {"token": HIDDEN}, "a": 1}
    assert b"s3cr3t" not in (tmp_path / "run.json").read_bytes()


def test_a_resumed_session_has_settings_of_its_own(tmp_path, monkeypatch):
    make_loop(RunRecordHook(), CheckpointHook(interval=1), work_dir=tmp_path, max_epochs=1).run()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    make_loop(RunRecordHook(), work_dir=tmp_path, max_epochs=2, train_data=batches(2)).run(
        resume=tmp_path / "epoch_1.safetensors"
    )
    first, second = RunFolder(tmp_path).manifest().sessions
    assert (first.settings["max_epochs"], second.settings["max_epochs"]) == (1, 2)
    assert ("hooks.CheckpointHook" in first.settings, "hooks.CheckpointHook" in second.settings) == (
        True,
        False,
    )
