"""What every writer that keeps its data promises, and what their base does."""

import errno
import os
import sys
import threading

import pytest

from trainbus.eventloop import ConfigurationError
from trainbus.hooks import CSVWriter, JSONLinesWriter, MLflowWriter, TensorBoardWriter, WandbWriter, Writer
from trainbus.testing import WriterChecks

from ...failing import fails
from .conftest import NEEDS, logging_loop
from .readers import column, exits, files, history, rows, runs, scalars, text


class OneByOne(Writer):
    """As one would write it after Pointrix's: scalars one by one, no call of the base's constructor."""

    def __init__(self):
        self.scalars = []

    def write_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


class TestJSONLines(WriterChecks):
    largest = 10**18  # its integers have 64 bits
    read = staticmethod(text)

    def make(self):
        return JSONLinesWriter()


class TestCSV(WriterChecks):
    read = staticmethod(text)

    def make(self):
        return CSVWriter()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
class TestTensorBoard(WriterChecks):
    digits = 1e-7  # of float32

    @pytest.fixture(autouse=True)
    def tool(self, events):
        self.events, before = events, set(threading.enumerate())
        yield
        for thread in set(threading.enumerate()) - before:
            thread.join(30)  # or its exception would be seen by a later test

    def make(self):
        return TensorBoardWriter()

    def read(self, work_dir, name):
        return scalars(self.events(work_dir / "tensorboard"), name)


@pytest.mark.usefixtures("offline")
class TestWandb(WriterChecks):
    validation_steps = 3, 6  # W&B has one count of steps, that of iterations

    def make(self):
        pytest.importorskip("wandb")
        return WandbWriter()

    def read(self, work_dir, name):
        return [one for path in files(work_dir) for one in column(rows(path), name)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("offline")
class TestMLflow(WriterChecks):
    infinity = sys.float_info.max  # which it stores so
    restores_folder = False  # its store is a data base

    @pytest.fixture(autouse=True)
    def tool(self, request, client):
        self.client = client

    def make(self):
        return MLflowWriter()

    def read(self, work_dir, name):
        return history(self.client(work_dir), *runs(self.client(work_dir)), name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("cls", [WandbWriter, MLflowWriter])
def test_an_aborted_run_is_marked_as_failed(cls, tmp_path, request):
    pytest.importorskip(NEEDS[cls])
    client = request.getfixturevalue("client") if cls is MLflowWriter else None
    loop = logging_loop(cls(), work_dir=tmp_path, every=fails(ValueError("no")))
    loop.bus.abort_timeout = 25.0  # on a busy machine it takes longer than the default to begin
    with pytest.raises(ValueError, match="no"):
        loop.run()
    if cls is WandbWriter:
        assert exits(*files(tmp_path)) == [1]
    else:
        assert [run.info.status for run in runs(client(tmp_path))] == ["FAILED"]


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
    assert logs[-1].get("id") == "writer-lost-data"


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
