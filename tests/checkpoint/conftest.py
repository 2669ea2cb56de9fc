import pytest

from trainbus.eventloop.checkpoint import load, write

from .faults import Faults


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """One file for all tests of a module: hypothesis makes many."""
    return tmp_path_factory.mktemp("module") / "damaged.safetensors"


@pytest.fixture
def written(tmp_path):
    """``written(staged)`` returns what is read from the file of a staged tree."""

    def write_and_load(staged):
        write(staged, tmp_path / "c")
        return load(tmp_path / "c")

    return write_and_load
