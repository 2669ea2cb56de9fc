"""``trainbus``, the name that programs import."""

import pydoc
import subprocess
import sys
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location

import pytest

import eventloop
import hooks
import trainbus
from eventloop.cli import main

PUBLIC = {*eventloop.__all__, *eventloop.events.__all__, *hooks.__all__}


def test_it_exports_the_public_names_of_both_packages_which_are_few_and_the_mount_points():
    assert sorted(trainbus.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) < set(dir(trainbus))
    for package in (eventloop, eventloop.events, hooks):
        assert all(getattr(trainbus, name) is getattr(package, name) for name in package.__all__)
    assert len(eventloop.__all__) <= 45


def test_names_can_be_imported_singly_and_with_star():
    from trainbus import Bus, EMAHook

    assert (Bus, EMAHook) == (eventloop.Bus, hooks.EMAHook)
    names = {}
    exec("from trainbus import *", names)  # noqa: S102
    assert set(PUBLIC) < set(names)


def test_help_works_without_the_libraries_that_some_names_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "ignite", None)  # as if it were not installed
    monkeypatch.delitem(vars(trainbus), "TrainbusSaver", raising=False)
    assert "TrainbusSaver" not in dir(trainbus)
    assert "class Bus" in pydoc.render_doc(trainbus, renderer=pydoc.plaintext)


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match=r"'trainbus'.*'EMAHok'"):
        _ = trainbus.EMAHok
    with pytest.raises(ImportError, match="'EMAHok'"):
        from trainbus import EMAHok  # noqa: F401


def test_import_and_version_load_no_other_module():
    source = (
        "import sys, trainbus; trainbus.__version__; print([m for m in ('torch', 'eventloop', 'hooks') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "[]\n"  # noqa: S603


def test_the_version_is_that_of_the_distribution(capsys):
    assert trainbus.__version__ == metadata.version("trainbus")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trainbus {trainbus.__version__}\n"


def test_ctrl_c_while_the_command_is_being_imported_is_no_traceback(monkeypatch):
    class Struck:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "eventloop.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "eventloop.cli")
    monkeypatch.setattr(sys, "meta_path", [Struck, *sys.meta_path])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert trainbus.main() == 130


@pytest.mark.parametrize("name", ["EMAHook", "hooks"])
def test_the_error_names_a_local_hooks_py_that_shadows_the_package(tmp_path, monkeypatch, name):
    file = tmp_path / "hooks.py"
    file.write_text("x = 1")
    spec = spec_from_file_location("hooks", file)
    monkeypatch.setitem(sys.modules, "hooks", module_from_spec(spec))
    monkeypatch.delitem(vars(trainbus), name, raising=False)
    with pytest.raises(ImportError, match=f"'hooks' is {file}"):
        getattr(trainbus, name)
    assert trainbus.Bus is eventloop.Bus
