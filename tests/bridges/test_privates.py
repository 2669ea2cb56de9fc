"""Undocumented names of other libraries: a bridge refuses a library that lacks one, before a training begins."""

import importlib
import inspect
from contextlib import suppress

import pytest
import torch

import trainbus
from trainbus.bridges import TrainbusCheckpointIO
from trainbus.eventloop import Bus, ConfigurationError, Run
from trainbus.eventloop.privates import check_names

HOSTS = {"lightning": "lightning", "transformers": "transformers", "ignite": "pytorch-ignite", "accelerate": "accelerate"}


def names_of(host, table="NAMES"):
    return getattr(importlib.import_module(f"trainbus.bridges.{host}.privates"), table)


def attach(host, folder):
    """Return the trainer of a host, and a function that attaches a bus to it."""
    pytest.importorskip("lightning.pytorch" if host == "lightning" else host)
    trainer = importlib.import_module(f"tests.bridges.conformance.{host}").Job(folder, every=4).trainer
    return trainer, lambda: trainbus.attach(Bus(), trainer, **{"checkpoints": True} if host == "accelerate" else {})


def take_away(monkeypatch, path, **roots):
    """Take a name away from its object for the rest of a test."""
    root, *parts, name = path.split(".")
    owner = roots[root]
    for part in parts:
        owner = getattr(owner, part)
    if inspect.ismodule(owner) or inspect.isclass(owner):
        monkeypatch.delattr(owner, name)
        return

    def gone(self):
        raise AttributeError(name)

    monkeypatch.setattr(type(owner), name, property(gone, lambda self, value: None), raising=False)


def assert_names(error, library, name):
    package = "ignite" if library == "pytorch-ignite" else library
    version = importlib.import_module(package).__version__
    message = str(error.value)
    assert f"{library} {version} " in message
    assert repr(name) in message
    assert "pip install" in message


@pytest.mark.parametrize(("host", "path"), [(host, path) for host in HOSTS for path in names_of(host)])
def test_attaching_to_a_library_without_a_name_is_an_error(host, path, tmp_path, monkeypatch):
    """Each name of each table is looked up; the error names library, version, name, and what to install."""
    trainer, attached = attach(host, tmp_path)
    package = importlib.import_module("lightning.pytorch" if host == "lightning" else host)
    roots = dict.fromkeys(("trainer", "engine", "accelerator"), trainer) | {"package": package, "transformers": package}
    with monkeypatch.context() as patch:
        for one in path.split("|"):  # of these the installed version has one
            with suppress(AttributeError):
                take_away(patch, one, **roots)
        with pytest.raises(ConfigurationError) as error:
            attached()
    assert_names(error, HOSTS[host], path.rpartition(".")[2])
    attached().detach()  # nothing was left behind


@pytest.mark.parametrize("path", names_of("lightning", "PLUGIN_NAMES"))
def test_a_plugin_in_a_library_without_a_name_is_an_error(path, monkeypatch):
    """``TrainbusCheckpointIO()`` needs no bus, and looks up its names itself."""
    package = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.strategies import SingleDeviceStrategy

    roots = {"callback": package.callbacks.ModelCheckpoint(), "strategy": SingleDeviceStrategy()}
    with monkeypatch.context() as patch:
        take_away(patch, path, **roots)
        with pytest.raises(ConfigurationError) as error:
            TrainbusCheckpointIO()
    assert_names(error, "lightning", path.rpartition(".")[2])


def test_a_run_with_an_accelerator_without_a_name_is_an_error(monkeypatch):
    """``Run(accelerator=...)`` needs no bridge."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.delattr(accelerator, "_custom_objects")
    with pytest.raises(ConfigurationError) as error:
        Run(model=torch.nn.Linear(1, 1), accelerator=accelerator)
    assert_names(error, "accelerate", "_custom_objects")


def test_a_missing_object_on_the_way_is_named():
    """A path has several parts, and the first one that is missing is the one to name."""
    with pytest.raises(ConfigurationError, match="'fit_loop'"):
        check_names("torch", "torch", {"trainer.fit_loop._data_fetcher": ("a test", "1.0")}, trainer=object())
