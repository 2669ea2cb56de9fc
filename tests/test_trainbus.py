"""``trainbus``, the name that programs import."""

import pydoc
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

import trainbus
from trainbus import errors, eventloop, events, hooks
from trainbus.cli import main

AROUND = {
    *("Alert", "AlertHook", "Dashboard", "RayTrainHook", "RunRecordHook", "TraceHook", "TrainbusCheckpointIO"),
    *("TransformersHook", "add_hooks", "attach"),
}
ELSEWHERE = {*events.__all__, *errors.__all__} - {"Event", "Progress"}
PUBLIC = {*eventloop.__all__, *hooks.__all__, *AROUND} - ELSEWHERE


def test_it_exports_the_public_names_of_both_packages_which_are_few_and_the_mount_points():
    assert sorted(trainbus.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) < set(dir(trainbus))
    for package in (eventloop, hooks):
        assert all(getattr(trainbus, name) is getattr(package, name) for name in package.__all__ if name in PUBLIC)
    assert len(PUBLIC) <= 70


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AfterTrainIter", "it is in trainbus.events"),
        ("TrainingError", "it is in trainbus.errors"),
        ("TrainLop", r"\(did you mean 'TrainLoop'"),
        ("ConfigurationErorr", r"\(did you mean 'ConfigurationError'"),
    ],
)
def test_a_name_that_is_elsewhere_or_misspelt_is_answered(name, said):
    with pytest.raises(AttributeError, match=said):
        getattr(trainbus, name)


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
    parts = "('torch', 'trainbus.eventloop', 'trainbus.hooks')"
    source = f"import sys, trainbus; trainbus.__version__; print([m for m in {parts} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "[]\n"  # noqa: S603


def test_the_version_is_that_of_the_distribution(capsys):
    assert trainbus.__version__ == metadata.version("trainbus")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trainbus {trainbus.__version__}\n"


def test_ctrl_c_while_the_command_is_being_imported_is_no_traceback(monkeypatch):
    class Struck:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "trainbus.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "trainbus.cli")
    monkeypatch.setattr(sys, "meta_path", [Struck, *sys.meta_path])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert trainbus.main() == 130


def test_a_checkout_without_links_says_so(tmp_path):
    package = tmp_path / "trainbus"
    package.mkdir()
    shutil.copyfile(trainbus.__file__, package / "__init__.py")
    for name in ("eventloop", "hooks"):  # as git on Windows writes a link, and a downloaded archive
        (package / name).write_text(f"../{name}")
    command = [sys.executable, "-c", "import trainbus"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)  # noqa: S603
    assert found.returncode == 1
    assert f"{package / 'eventloop'} is no folder: this checkout was made without symbolic links" in found.stderr


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_project_may_have_modules_of_its_own_with_the_names_of_the_parts(tmp_path, kind):
    for name in ("hooks", "eventloop", "bridges", "observe", "config", "cli"):
        file = tmp_path / f"{name}.py" if kind == "file" else tmp_path / name / "__init__.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"mine = '{name}'")
    source = "import hooks, eventloop, trainbus; print(hooks.mine, eventloop.mine, trainbus.EMAHook.__module__)"
    for command, said in (("-c", source), "hooks eventloop trainbus.hooks.ema"), (("-m", "trainbus", "--version"), "trainbus "):
        found = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, cwd=tmp_path)  # noqa: S603
        assert found.stdout.startswith(said)
