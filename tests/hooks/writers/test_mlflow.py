import re
import sys

import pytest
import torch

from trainbus.eventloop import ConfigurationError
from trainbus.hooks import MLflowWriter
from trainbus.hooks.writers import RunFacts, Where
from trainbus.media import Image

from .conftest import logging_loop, write
from .readers import history, runs

# What MLflow uses of SQLAlchemy is deprecated there.
pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.filterwarnings("ignore")]
AT = Where("train", epoch=1, iter=3)


@pytest.mark.long
def test_logged_data_is_readable_by_the_mlflow_client(client, tmp_path):
    config = {"lr": 0.1, "model": {"depth": 3, "names": ["a"]}}
    report = lambda event: event.run.report(noise=Image(torch.ones(3, 2, 5)))  # noqa: E731
    writer = MLflowWriter(experiment="digits")
    logging_loop(writer, work_dir=tmp_path, name="first", config=config, every=report).run()
    found = client(tmp_path)
    (run,) = runs(found)
    assert run.data.params == {"lr": "0.1", "model.depth": "3", "model.names": "['a']"}
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert found.get_experiment(run.info.experiment_id).name == "digits"
    names = [artifact.path for artifact in found.list_artifacts(run.info.run_id, "images")]
    assert sorted(re.split("[+%]", name)[2] for name in names if name.endswith(".png")) == list("123456")
    assert all(re.search("train[~#]noise", name) for name in names)


def test_a_resumed_run_continues_and_keeps_its_parameters(client, tmp_path):
    for step, lr in ((1, 0.1), (2, 0.2)):
        writer = MLflowWriter()
        writer.open(RunFacts("digits", tmp_path))
        writer.write_config({"lr": lr, f"new {step}": step})
        writer.write_scalars({"train/loss": float(step)}, step, AT)
        writer.flush()
        assert runs(client(tmp_path))[0].info.status == "RUNNING"
        writer.close()
    found = client(tmp_path)
    (run,) = runs(found)
    assert history(found, run, "train/loss") == [(1, 1.0), (2, 2.0)]
    assert run.data.params == {"lr": "0.1", "new 1": "1", "new 2": "2"}


def test_a_run_missing_from_the_store_is_created_again(client, tmp_path):
    (tmp_path / "mlflow_run_id").write_text("0123456789abcdef0123456789abcdef\n")
    write(MLflowWriter(), tmp_path)
    (run,) = runs(client(tmp_path))
    assert (tmp_path / "mlflow_run_id").read_text() == f"{run.info.run_id}\n"


@pytest.mark.long
def test_large_batches_are_split_and_invalid_names_are_replaced(client, tmp_path):
    write(MLflowWriter(), tmp_path, *((step, {"val/AR@100": float(step), "val/ü": 1.0}) for step in range(600)))
    found = client(tmp_path)
    (run,) = runs(found)
    assert history(found, run, "val/AR_100") == [(step, float(step)) for step in range(600)]
    assert len(history(found, run, "val/_")) == 600


def test_names_of_parameters_that_mlflow_refuses_cost_no_other_parameter(client, tmp_path):
    config = {"lr": 0.1, "/data/x": 1, "a//b": 2, "..": 3, "n" * 300: 4}
    writer = MLflowWriter()
    writer.open(RunFacts("digits", tmp_path))
    writer.write_config(config)
    writer.close()
    (run,) = runs(client(tmp_path))
    assert run.data.params == {"lr": "0.1", "_/data/x": "1", "a/_/b": "2", "__": "3", "n" * 250: "4"}


def test_a_store_that_was_unavailable_gets_all_data_later(client, tmp_path, monkeypatch, logs):
    mlflow = pytest.importorskip("mlflow")
    answers, log_batch = [], mlflow.MlflowClient.log_batch

    def flaky(self, run_id, **what):
        if not answers and what.get("metrics"):
            raise OSError("connection refused")
        return log_batch(self, run_id, **what)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", flaky)
    loop = logging_loop(MLflowWriter(), work_dir=tmp_path)
    loop.bus.on("after_train", lambda event: (loop.bus.drain(), answers.append("yes")))
    loop.run()
    assert {line["writer"] for line in logs} == {"MLflowWriter"}
    found = client(tmp_path)
    assert history(found, runs(found)[0], "train/loss") == [(step, float(step)) for step in range(1, 7)]


def test_several_runs_can_share_a_store(client, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    found = client(uri)
    found.create_experiment("digits", artifact_location=(tmp_path / "artifacts").as_uri())
    for name in ("first", "second"):
        logging_loop(MLflowWriter(uri, experiment="digits"), name=name, max_epochs=1).run()
    assert {run.info.run_name for run in runs(found)} == {"first", "second"}


def test_without_packages_for_local_stores_the_error_names_them(client, monkeypatch):
    for name in ("sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"sqlalchemy.*alembic"):
        MLflowWriter()
    MLflowWriter("http://localhost:5000")
