import threading

import pytest
import structlog
import torch

from eventloop import ConfigurationError
from eventloop.registry import find
from hooks import ConsoleWriter, CSVWriter, JSONLinesWriter, MLflowWriter, TensorBoardWriter, WandbWriter, Writer

NEEDS = {TensorBoardWriter: "tensorboard", WandbWriter: "wandb", MLflowWriter: "mlflow"}
ALL = [ConsoleWriter, JSONLinesWriter, CSVWriter, TensorBoardWriter, WandbWriter, MLflowWriter]


class OneByOne(Writer):
    """As one would write it after Pointrix's: scalars one by one, no call of the base's constructor."""

    def __init__(self):
        self.scalars = []

    def write_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


class Broken(Writer):
    def __init__(self):
        self.calls = 0

    def write_scalars(self, scalars, step, where):
        self.calls += 1
        raise OSError("the disk is full")


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore")  # MLflow's use of SQLAlchemy
def test_a_writer_is_called_from_its_lane_only(logged, tmp_path, cls):
    if cls in NEEDS:
        pytest.importorskip(NEEDS[cls])
    writer = logged.watched(cls)()
    report = lambda event: event.run.report_image("noise", torch.zeros(2, 2))  # noqa: E731
    logged.loop(writer, work_dir=tmp_path, config={"lr": 0.1}, every=report).run()
    threads = {ident for _, ident in writer.calls}
    assert {name for name, _ in writer.calls} >= ({"open", "write_scalars", "close"} if cls is not ConsoleWriter else set())
    assert ("write_image" in dict(writer.calls)) == (cls in NEEDS)
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_a_writer_may_take_scalars_one_by_one(logged):
    writer = OneByOne()
    logged.loop(writer, max_epochs=1, val_data=None, metrics=None, val_step=None).run()
    assert writer.scalars == [("train/loss", 1.0, 1), ("train/loss", 2.0, 2), ("train/loss", 3.0, 3)]


def test_a_writer_that_takes_many_can_be_given_one(tmp_path):
    class Many(Writer):
        def write_scalars(self, scalars, step, where):
            self.last = (scalars, step, where.stage)

    writer = Many()
    writer.write_scalar("val/accuracy", 0.5, 3)
    assert writer.last == ({"val/accuracy": 0.5}, 3, "val")


def test_a_writer_that_takes_no_scalars_says_what_to_define():
    with pytest.raises(NotImplementedError, match="Writer must define write_scalars or write_scalar"):
        Writer().write_scalars({"a": 1.0}, 1, None)


def test_the_others_go_on_when_one_writer_fails(logged, tmp_path):
    broken, other = Broken(), OneByOne()
    with structlog.testing.capture_logs() as lines:
        logged.loop(broken, CSVWriter(), other, work_dir=tmp_path).run()
    assert len(other.scalars) == 8
    assert len((tmp_path / "scalars.csv").read_text().splitlines()) == 9
    assert [line["writer"] for line in lines if line["log_level"] == "error"] == ["Broken"] * broken.calls


def test_writers_hear_that_an_exception_has_ended_the_run(logged):
    class Fate(OneByOne):
        fate = ()

        def aborted(self):
            self.fate = (*self.fate, "aborted")

        def close(self):
            self.fate = (*self.fate, "closed")

    good, bad = Fate(), Fate()
    logged.loop(good).run()

    def fail(event):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        logged.loop(bad, every=fail).run()
    assert (good.fate, bad.fate) == (("closed",), ("aborted", "closed"))


@pytest.mark.parametrize("cls", ALL)
def test_a_configuration_can_name_it(cls):
    assert find("writer", cls.__name__) is cls


@pytest.mark.parametrize("cls", [cls for cls in ALL if cls not in NEEDS])
def test_an_interval_is_positive(cls):
    with pytest.raises(ConfigurationError, match="interval=0"):
        cls(interval=0)
