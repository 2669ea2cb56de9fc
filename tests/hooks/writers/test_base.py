import csv
import json
import shutil
import sys

import pytest
import structlog
import torch

from eventloop import ConfigurationError
from hooks import ConsoleWriter, CSVWriter, JSONLinesWriter, MLflowWriter, TensorBoardWriter, WandbWriter, Writer

from ...failing import fails

NEEDS = {TensorBoardWriter: "tensorboard", WandbWriter: "wandb", MLflowWriter: "mlflow"}
ALL = [ConsoleWriter, JSONLinesWriter, CSVWriter, TensorBoardWriter, WandbWriter, MLflowWriter]


class OneByOne(Writer):
    """As one would write it after Pointrix's: scalars one by one, no call of the base's constructor."""

    def __init__(self):
        self.scalars = []

    def write_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


@pytest.mark.parametrize("cls", [cls for cls in ALL if cls is not ConsoleWriter])
def test_without_a_work_dir_nothing_is_written_which_is_told(logged, tmp_path, monkeypatch, cls):
    if cls in NEEDS:
        pytest.importorskip(NEEDS[cls])
    monkeypatch.chdir(tmp_path)
    report = lambda event: event.run.report_image("noise", torch.zeros(2, 2))  # noqa: E731
    with structlog.testing.capture_logs() as lines:
        logged.loop(cls(), config={"lr": 0.1}, every=report).run()
    assert list(tmp_path.iterdir()) == []
    (told,) = [line for line in lines if "write nothing" in line["event"]]
    assert told["writers"] == cls.__name__
    assert {line["event"].partition(";")[0] for line in lines if line is not told} <= {"none of the writers takes images"}


def test_a_writer_can_define_write_scalar_only(logged):
    writer = OneByOne()
    logged.loop(writer, max_epochs=1, val_data=None, metrics=None, val_step=None).run()
    assert writer.scalars == [("train/loss", 1.0, 1), ("train/loss", 2.0, 2), ("train/loss", 3.0, 3)]


def test_a_writer_without_scalar_methods_is_an_error():
    with pytest.raises(NotImplementedError, match="write_scalar"):
        Writer().write_scalars({"a": 1.0}, 1, None)


@pytest.mark.parametrize(
    ("cls", "module"), [(TensorBoardWriter, "torch.utils.tensorboard"), (WandbWriter, "wandb"), (MLflowWriter, "mlflow")]
)
def test_without_its_library_the_error_names_the_extra_to_install(monkeypatch, cls, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=rf'pip install "trainbus\[{NEEDS[cls]}\]"'):
        cls()


def steps(path):
    if path.suffix == ".csv":
        return [int(row["step"]) for row in csv.DictReader(path.read_text().splitlines()) if row["train/loss"]]
    lines = map(json.loads, path.read_text().splitlines())
    return [line["step"] for line in lines if "train/loss" in line]


@pytest.mark.parametrize(("cls", "file"), [(JSONLinesWriter, "scalars.jsonl"), (CSVWriter, "scalars.csv")])
def test_a_recreated_work_dir_gets_later_lines(logged, tmp_path, cls, file):
    def remove(event):
        if event.progress.iter == 3:
            loop.bus.drain()
            shutil.rmtree(tmp_path / "out")
            (tmp_path / "out").mkdir()

    loop = logged.loop(cls(), work_dir=tmp_path / "out", every=remove)
    with structlog.testing.capture_logs() as lines:
        loop.run()
    assert sorted(set(steps(tmp_path / "out" / file))) == [4, 5, 6]
    told = [line["event"] for line in lines if line["log_level"] != "debug"]
    assert set(told) == {"a writer failed and will be tried again", "a writer works again"}


@pytest.mark.parametrize(("cls", "file"), [(JSONLinesWriter, "scalars.jsonl"), (CSVWriter, "scalars.csv")])
def test_a_temporarily_full_disk_loses_no_line_and_leaves_no_incomplete_line(script, tmp_path, cls, file):
    done = script(
        f"""
        import resource, torch
        from eventloop import Bus, Run
        from hooks import CSVWriter, JSONLinesWriter, LoggerHook

        def room(size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        bus = Bus(LoggerHook(writers=[{cls.__name__}(interval=1)]))
        with Run(bus, model=torch.nn.Linear(1, 1), work_dir={str(tmp_path)!r}) as run:
            for epoch in run.epochs(4):
                room(2000 if epoch == 1 else resource.RLIM_INFINITY)
                for batch in run.train(range(100)):
                    run.report(loss=0.125)
                bus.drain()
        """
    )
    assert done.returncode == 0, done.stderr
    assert "a writer failed" in done.stderr
    assert sorted(set(steps(tmp_path / file))) == list(range(1, 401))


@pytest.mark.parametrize(("cls", "file"), [(JSONLinesWriter, "scalars.jsonl"), (CSVWriter, "scalars.csv")])
def test_symbolic_links_are_not_followed(logged, tmp_path, cls, file):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).symlink_to(tmp_path / "precious")
    (tmp_path / "out" / f"{file}.tmp").write_text("mine, too")
    with structlog.testing.capture_logs() as lines:
        logged.loop(cls(), work_dir=tmp_path / "out").run(resume="auto")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "out" / f"{file}.tmp").read_text() == "mine, too"
    assert lines[-1]["event"] == "a writer has lost data"


def test_aborted_is_called_if_an_exception_ends_the_run(logged):
    class Fate(OneByOne):
        fate = ()

        def aborted(self):
            self.fate = (*self.fate, "aborted")

        def close(self):
            self.fate = (*self.fate, "closed")

    good, bad = Fate(), Fate()
    logged.loop(good).run()

    with pytest.raises(ValueError, match="no"):
        logged.loop(bad, every=fails(ValueError("no"))).run()
    assert (good.fate, bad.fate) == (("closed",), ("aborted", "closed"))
