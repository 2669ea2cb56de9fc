"""A run that logs to a writer, whichever it is, and lines for a writer alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.eventloop import TrainLoop
from trainbus.hooks import LoggerHook, MLflowWriter, TensorBoardWriter, WandbWriter, Writer
from trainbus.hooks.writers import RunFacts, Where

from ..conftest import Scores, make_loop


def logging_loop(*writers: Writer, every: Any = None, **options: Any) -> TrainLoop:
    """Two epochs of three iterations; the loss is 1 in the first iteration, 2 in the second and so on."""
    validates = {"val_data": [torch.ones(1, 1)], "val_step": lambda model, batch: {}}
    made = make_loop(
        LoggerHook(interval=1, writers=writers),
        model=torch.nn.Linear(1, 1),
        step=lambda model, batch: model(batch).mean(),
        train_data=[torch.ones(1, 1)] * 3,
        **validates | {"metrics": {"accuracy": Scores(0.75, 1.0, 1.25)}} | options,
    )
    if every is not None:
        made.bus.on("after_train_iter", every)
    made.bus.on("after_train_iter", lambda event: event.run.report(loss=event.progress.iter + 1.0))
    return made


def write(writer: Writer, work_dir: Path, *lines: tuple[int, dict[str, Any]], close: bool = True) -> None:
    """Open a writer for a run in a work dir, write a line of scalars at each step, and flush; they name their stage."""
    writer.open(RunFacts("digits", work_dir))
    for step, values in lines:
        writer.write_scalars(values, step, Where(next(iter(values)).partition("/")[0], epoch=1, iter=step))
    writer.flush()
    if close:
        writer.close()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools send no word home."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")


@pytest.fixture
def events(monkeypatch):
    """Reads a folder with TensorBoard's own reader."""
    names = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    # Files of one second are read in the order of these numbers, as text: all shall have as many digits.
    monkeypatch.setattr(names, "_global_uid", type(names._global_uid)(1000))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(directory):
        kinds = (accumulator.SCALARS, accumulator.HISTOGRAMS, accumulator.TENSORS)
        return accumulator.EventAccumulator(str(directory), size_guidance=dict.fromkeys(kinds, 0)).Reload()

    return read


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """An empty store, which takes MLflow seconds to make."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    pytest.importorskip("mlflow").MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def client(empty_store, tmp_path):
    """Opens the store of a work dir, or one at an address, with MLflow's own client."""
    mlflow = pytest.importorskip("mlflow")
    shutil.copy(empty_store, tmp_path / "mlflow.db")

    def connect(place):
        uri = place if isinstance(place, str) else f"sqlite:///{place}/mlflow.db"
        return mlflow.MlflowClient(tracking_uri=uri)

    return connect


NEEDS = {TensorBoardWriter: "tensorboard", WandbWriter: "wandb", MLflowWriter: "mlflow"}
