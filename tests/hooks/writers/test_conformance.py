"""What every writer that keeps its data promises, and what their base does."""

import errno
import math
import os
import shutil
import sys
import threading

import pytest
import torch

from trainbus.eventloop import ConfigurationError
from trainbus.hooks import CSVWriter, JSONLinesWriter, MLflowWriter, TensorBoardWriter, WandbWriter, Writer
from trainbus.media import Image

from ...failing import fails
from .conftest import KEEPING, NEEDS, logging_loop, write
from .readers import exits, files, runs, text


class OneByOne(Writer):
    """As one would write it after Pointrix's: scalars one by one, no call of the base's constructor."""

    def __init__(self):
        self.scalars = []

    def write_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


def test_its_own_tool_reads_the_scalars_of_a_run(kept, tmp_path):
    cls, read = kept
    logging_loop(cls(), work_dir=tmp_path).run()
    assert read(tmp_path, "train/loss") == [(step, float(step)) for step in range(1, 7)]
    validations = (3, 6) if cls is WandbWriter else (1, 2)  # W&B has one count of steps, that of iterations
    assert read(tmp_path, "val/accuracy") == [*zip(validations, (0.75, 1.0), strict=True)]


def test_nan_infinities_and_all_digits_are_kept(kept, tmp_path):
    cls, read = kept
    large = 10**18 if cls is JSONLinesWriter else 10**20  # its integers have 64 bits
    values = [math.nan, math.inf, -math.inf, 1 / 3, large, True]
    write(cls(), tmp_path, *((step, {"train/loss": value}) for step, value in enumerate(values, 1)))
    found = [float(value) for _, value in read(tmp_path, "train/loss")]
    assert math.isnan(found[0])
    most = sys.float_info.max if cls is MLflowWriter else math.inf  # which it stores so
    digits = 1e-7 if cls is TensorBoardWriter else 0.0  # of float32
    assert found[1:] == pytest.approx([most, -most, *map(float, values[3:])], rel=digits, abs=0.0)


def test_a_resumed_run_continues_what_was_kept(kept, tmp_path):
    cls, read = kept
    for step in (1, 2):
        write(cls(), tmp_path, (step, {"train/loss": step / 2, f"train/new{step}": 1.0}))
    assert read(tmp_path, "train/loss") == [(1, 0.5), (2, 1.0)]
    assert read(tmp_path, "train/new2") == [(2, 1.0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_folder_that_is_emptied_gets_later_data(kept, tmp_path, logs):
    cls, read = kept
    if cls is MLflowWriter:
        pytest.skip("its store is a data base")

    def remove(event):
        if event.progress.iter == 3:
            loop.bus.drain()
            for path in tmp_path.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    before = set(threading.enumerate())
    loop = logging_loop(cls(), work_dir=tmp_path, every=remove)
    loop.run()
    for thread in set(threading.enumerate()) - before if cls is TensorBoardWriter else ():
        thread.join(30)  # or its exception would be seen by a later test
    assert sorted(set(read(tmp_path, "train/loss")))[-3:] == [(step, float(step)) for step in (4, 5, 6)]
    told = {line["event"] for line in logs if line["log_level"] != "debug"}
    assert told == {"a writer failed and will be tried again", "a writer works again"}


def test_an_aborted_run_is_marked_as_failed(kept, tmp_path, request):
    cls, _ = kept
    if cls not in (WandbWriter, MLflowWriter):
        pytest.skip("it keeps no state of a run")
    loop = logging_loop(cls(), work_dir=tmp_path, every=fails(ValueError("no")))
    loop.bus.abort_timeout = 25.0  # on a busy machine it takes longer than the default to begin
    with pytest.raises(ValueError, match="no"):
        loop.run()
    if cls is WandbWriter:
        assert exits(*files(tmp_path)) == [1]
    else:
        assert [run.info.status for run in runs(request.getfixturevalue("client")(tmp_path))] == ["FAILED"]


@pytest.mark.parametrize("cls", KEEPING)
def test_without_a_work_dir_nothing_is_written_which_is_told(tmp_path, monkeypatch, cls, logs):
    if cls in NEEDS:
        pytest.importorskip(NEEDS[cls])
    monkeypatch.chdir(tmp_path)
    report = lambda event: event.run.report(noise=Image(torch.zeros(2, 2)))  # noqa: E731
    logging_loop(cls(), config={"lr": 0.1}, every=report).run()
    assert list(tmp_path.iterdir()) == []
    (told,) = [line for line in logs if "write nothing" in line["event"]]
    assert told["writers"] == cls.__name__
    assert {line["event"].partition(";")[0] for line in logs if line is not told} <= {"none of the writers takes images"}


def test_a_writer_can_define_write_scalar_only_and_must_define_a_method_for_scalars():
    writer = OneByOne()
    logging_loop(writer, max_epochs=1, val_data=None, metrics=None, val_step=None).run()
    assert writer.scalars == [("train/loss", 1.0, 1), ("train/loss", 2.0, 2), ("train/loss", 3.0, 3)]
    with pytest.raises(NotImplementedError, match="write_scalar"):
        Writer().write_scalars({"a": 1.0}, 1, None)


@pytest.mark.parametrize(
    ("cls", "module"), [(TensorBoardWriter, "torch.utils.tensorboard"), (WandbWriter, "wandb"), (MLflowWriter, "mlflow")]
)
def test_without_its_library_the_error_names_the_extra_to_install(monkeypatch, cls, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=rf'pip install "trainbus\[{NEEDS[cls]}\]"'):
        cls()


FILES = pytest.mark.parametrize(("cls", "file"), [(JSONLinesWriter, "scalars.jsonl"), (CSVWriter, "scalars.csv")])


@FILES
def test_a_temporarily_full_disk_loses_no_line_and_leaves_no_incomplete_line(script, tmp_path, cls, file):
    done = script(
        f"""
        import resource, torch
        from trainbus.eventloop import Bus, Run
        from trainbus.hooks import CSVWriter, JSONLinesWriter, LoggerHook

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
    assert sorted({step for step, _ in text(tmp_path, "train/loss")}) == list(range(1, 401))


@FILES
def test_symbolic_links_are_not_followed(tmp_path, cls, file, logs):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).symlink_to(tmp_path / "precious")
    (tmp_path / "out" / f"{file}.tmp").write_text("mine, too")
    logging_loop(cls(), work_dir=tmp_path / "out").run(resume="auto")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "out" / f"{file}.tmp").read_text() == "mine, too"
    assert logs[-1]["event"] == "a writer has lost data"


@FILES
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, None], ids=["no permission", "bad sector", "directory"])
def test_a_file_that_cannot_be_continued_is_kept_and_another_one_is_begun(tmp_path, monkeypatch, cls, file, number, logs):
    path, real = tmp_path / file, os.open
    path.mkdir() if number is None else path.write_text("of an earlier session\n")

    def refuse(name, *args, **options):
        if number is not None and name == path and path.exists() and path.read_text().startswith("of an earlier session"):
            raise OSError(number, os.strerror(number), str(path))
        return real(name, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    logging_loop(cls(), work_dir=tmp_path).run(resume="auto")
    monkeypatch.undo()
    assert sorted({step for step, _ in text(tmp_path, "train/loss")}) == list(range(1, 7))
    kept = tmp_path / f"{file}.old"
    assert kept.is_dir() if number is None else kept.read_text() == "of an earlier session\n"
    assert [line["to"] for line in logs if line["log_level"] == "warning"] == [str(kept)]


def test_aborted_is_called_if_an_exception_ends_the_run():
    class Fate(OneByOne):
        fate = ()

        def aborted(self):
            self.fate = (*self.fate, "aborted")

        def close(self):
            self.fate = (*self.fate, "closed")

    good, bad = Fate(), Fate()
    logging_loop(good).run()

    with pytest.raises(ValueError, match="no"):
        logging_loop(bad, every=fails(ValueError("no"))).run()
    assert (good.fate, bad.fate) == (("closed",), ("aborted", "closed"))
