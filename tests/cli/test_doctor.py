"""``trainbus doctor``, ``trainbus config schema``, ``run --print-config``, and ``--json`` of every command with a table."""

import copy
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.cli import app, files, main
from trainbus.config.defaults import DEFAULT_HOOKS
from trainbus.eventloop.checkpoint import load, save

jsonschema = pytest.importorskip("jsonschema")

PARTS = """
import torch
from trainbus.eventloop.registry import register
from trainbus.eventloop import Hook

def network():
    return torch.nn.Linear(2, 1)

def batches(number=4):
    return [torch.ones(2, 2) * index for index in range(number)]

def step(model, batch):
    return model(batch).square().mean()

@register
class OfMine(Hook):
    def __init__(self, often: int = 3, name_of_it: str = "x"):
        self.often = often
    def after_run(self, event): ...
"""
CONFIG = """
imports = ["mine", "torch.optim"]
model = "mine:network"
optimizer = { type = "torch.optim:SGD", lr = 0.1 }
step = "mine:step"
data.train = { type = "mine:batches", number = 6 }
data.val = "mine:batches"

[loop]
max_epochs = 2
seed = 1

[default_hooks]
progress_bar = false
checkpoint = { interval = 1, filename_tmpl = "after_{}.safetensors" }

[[custom_hooks]]
type = "EMAHook"
"""


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which commands add the current folder


@pytest.fixture
def mine(here) -> Iterator[Path]:
    Path("mine.py").write_text(PARTS)
    Path("mine.toml").write_text(CONFIG)
    yield Path("mine.toml")
    sys.modules.pop("mine", None)


@pytest.fixture
def schema(trainbus, here) -> Any:
    made = json.loads(trainbus("config", "schema").out)
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


def test_it_says_what_an_issue_needs_and_no_secret(here, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://me:hidden@store.example/path")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    for more in ((), ("--json",)):
        main(["doctor", *more])  # 1 if something is wrong with this machine
        out = capsys.readouterr().out
        assert torch.__version__ in out
        assert "msgspec" in out
        assert "free disk" in out
        assert "hidden" not in out


def test_what_is_wrong_is_named_with_the_way_out(trainbus, here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    problems = json.loads(trainbus("doctor", "--json", status=1).out)["problems"]
    assert any("MASTER_ADDR" in one and "torchrun" in one for one in problems)
    assert any("999 threads" in one and "OMP_NUM_THREADS=" in one for one in problems)
    assert "MASTER_ADDR" in trainbus("doctor", status=1).out


def test_a_configuration_is_checked_too(trainbus, mine):
    mine.write_text(CONFIG.replace("max_epochs", "max_epoch"))
    assert "max_epochs" in trainbus("doctor", str(mine), status=1).out


def test_the_schema_takes_what_runs_and_refuses_what_does_not(schema, mine):
    digits = Path(__file__).parents[2] / "examples/digits.toml"
    for text in (CONFIG, digits.read_text()):
        assert list(schema.iter_errors(tomllib.loads(text))) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("loop", "max_epoch"), 3),
        (("loop", "max_epochs"), "three"),
        (("loop", "max_epochs"), 0),
        (("default_hooks", "checkpoint"), {"intervall": 2}),
        (("default_hooks", "checkpoint"), True),
        (("default_hooks", "mine"), {"interval": 2}),
        (("custom_hooks",), [{"type": "EarlyStoppingHook", "monitor": "loss", "patiense": 3}]),
        (("custom_hooks",), {"type": "EMAHook"}),
        (("stepp",), "mine:step"),
        (("data", "valid"), "mine:batches"),
    ],
)
def test_the_schema_refuses_what_a_run_refuses(schema, where, value):
    config = tomllib.loads(CONFIG)
    table = config
    for name in where[:-1]:
        table = table[name]
    table[where[-1]] = value
    assert list(schema.iter_errors(config))


def test_the_schema_describes_options_and_has_defaults(schema):
    checkpoint = schema.schema["properties"]["default_hooks"]["properties"]["checkpoint"]["anyOf"][1]["properties"]
    assert "epochs or iterations between saves" in checkpoint["interval"]["description"]
    assert checkpoint["interval"]["default"] == -1
    assert schema.schema["properties"]["default_hooks"]["properties"].keys() == DEFAULT_HOOKS.keys()


def test_hooks_of_a_module_are_in_the_schema(trainbus, mine):
    made = json.loads(trainbus("config", "schema", "--import", "mine").out)
    assert "OfMine" in made["$defs"]["hook"]["anyOf"][0]["enum"]


def test_the_printed_configuration_is_the_same_run(trainbus, mine, schema):
    full = trainbus("run", str(mine), "loop.seed=3", "--print-config").out
    printed = json.loads(full)
    assert printed["loop"]["seed"] == 3
    assert printed["default_hooks"]["checkpoint"]["max_keep_ckpts"] == -1
    assert printed["default_hooks"]["progress_bar"] is False
    assert printed["custom_hooks"][0].keys() > {"type", "strict_load", "begin"}
    assert list(schema.iter_errors(printed)) == []
    Path("full.json").write_text(full)
    trainbus("run", str(mine), "loop.seed=3")
    trainbus("run", "full.json")
    one, other = (load(f"runs/{name}/after_2.safetensors")["state_dict"] for name in ("mine", "full"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    Path("again.json").write_text(full)
    assert json.loads(trainbus("run", "again.json", "--print-config").out) == printed
    assert not Path("runs/again").exists()


def commands() -> dict[str, Any]:
    """The functions of all commands by their words."""
    found = {}
    for group, words in ((app, ()), (files, ("checkpoint",))):
        for name in group:
            if not name.startswith("-") and (command := group[name]).default_command is not None:
                found[" ".join((*words, name))] = command.default_command
    return found


NO_TABLE = {"demo", "init", "migrate", "dashboard", "checkpoint export", "checkpoint import"}
"""They write files or serve a page, and print a few lines about them."""


def test_every_command_that_prints_a_table_has_json():
    lacking = {name for name, function in commands().items() if "json" not in function.__annotations__}
    assert lacking - {"--install-completion"} == NO_TABLE


def test_json_of_lists_has_what_the_tables_have(trainbus, here):
    save({"x": torch.ones(2)}, "a.safetensors")
    listed = json.loads(trainbus("checkpoint", "ls", ".", "--json").out)
    assert [(one["names"], one["state"], one["newest"]) for one in listed] == [(["a.safetensors"], "complete", False)]
    (verified,) = json.loads(trainbus("checkpoint", "verify", "a.safetensors", "--json").out)
    assert verified["state"] == "verified"
    every = json.loads(trainbus("hooks", "--json").out)
    assert every["CheckpointHook"]["options"]["interval"]["default"] == "-1"
    assert json.loads(trainbus("hooks", "CheckpointHook", "--json").out) == {"CheckpointHook": every["CheckpointHook"]}
    events = json.loads(trainbus("events", "--json").out)
    assert "outputs" in events["after_train_iter"]["fields"]
    before = copy.copy(every)
    assert before == every


def test_json_of_a_damaged_file_is_a_failure(trainbus, here):
    save({"x": torch.ones(2)}, "a.safetensors")
    data = bytearray(Path("a.safetensors").read_bytes())
    data[-1] ^= 1
    Path("a.safetensors").write_bytes(bytes(data))
    (found,) = json.loads(trainbus("checkpoint", "verify", "a.safetensors", "--json", status=1).out)
    assert found["state"] == "damaged"
    assert found["problem"]
