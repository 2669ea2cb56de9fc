import math
import re
import shutil
import sys

import pytest
import structlog
import torch

from eventloop import ConfigurationError
from hooks import MLflowWriter
from hooks.writers import RunFacts, Where

from ...failing import fails

# What MLflow uses of SQLAlchemy is deprecated there.
pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.filterwarnings("ignore")]
AT = Where("train", epoch=1, iter=3)


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


def runs(client):
    return client.search_runs([one.experiment_id for one in client.search_experiments()])


def history(client, run, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def test_logged_data_is_readable_by_the_mlflow_client(client, logged, tmp_path):
    config = {"lr": 0.1, "model": {"depth": 3, "names": ["a"]}}
    report = lambda event: event.run.report_image("noise", torch.ones(3, 2, 5))  # noqa: E731
    writer = MLflowWriter(experiment="digits")
    logged.loop(writer, work_dir=tmp_path, name="first", config=config, every=report).run()
    found = client(tmp_path)
    (run,) = runs(found)
    assert history(found, run, "train/loss") == [(step, float(step)) for step in range(1, 7)]
    assert history(found, run, "val/accuracy") == [(1, 0.75), (2, 1.0)]
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
    writer = MLflowWriter()
    writer.open(RunFacts("digits", tmp_path))
    writer.close()
    (run,) = runs(client(tmp_path))
    assert (tmp_path / "mlflow_run_id").read_text() == f"{run.info.run_id}\n"


def test_numbers_are_kept_large_batches_are_split_and_invalid_names_are_replaced(client, tmp_path):
    values = [math.nan, math.inf, -math.inf, 1 / 3, True, *map(float, range(600))]
    writer = MLflowWriter()
    writer.open(RunFacts("digits", tmp_path))
    for step, value in enumerate(values):
        writer.write_scalars({"val/AR@100": value, "val/ü": 1.0}, step, AT)
    writer.flush()
    writer.close()
    found = client(tmp_path)
    (run,) = runs(found)
    kept = [value for _, value in history(found, run, "val/AR_100")]
    assert math.isnan(kept[0])
    largest = sys.float_info.max  # MLflow stores infinity so
    assert kept[1:] == [largest, -largest, 1 / 3, 1.0, *values[5:]]
    assert len(history(found, run, "val/_")) == len(values)


def test_a_store_that_was_unavailable_gets_all_data_later(client, logged, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    answers, log_batch = [], mlflow.MlflowClient.log_batch

    def flaky(self, run_id, **what):
        if not answers and what.get("metrics"):
            raise OSError("connection refused")
        return log_batch(self, run_id, **what)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", flaky)
    loop = logged.loop(MLflowWriter(), work_dir=tmp_path)
    loop.bus.on("after_train", lambda event: (loop.bus.drain(), answers.append("yes")))
    with structlog.testing.capture_logs() as lines:
        loop.run()
    assert {line["writer"] for line in lines} == {"MLflowWriter"}
    found = client(tmp_path)
    assert history(found, runs(found)[0], "train/loss") == [(step, float(step)) for step in range(1, 7)]


def test_several_runs_can_share_a_store(client, logged, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    found = client(uri)
    found.create_experiment("digits", artifact_location=(tmp_path / "artifacts").as_uri())
    for name in ("first", "second"):
        logged.loop(MLflowWriter(uri, experiment="digits"), name=name, max_epochs=1).run()
    assert {run.info.run_name for run in runs(found)} == {"first", "second"}


def test_an_aborted_run_is_marked_as_failed(client, logged, tmp_path):
    loop = logged.loop(MLflowWriter(), work_dir=tmp_path, every=fails(ValueError("no")))
    loop.bus.abort_timeout = 25.0  # on a busy machine it takes longer than the default to begin
    with pytest.raises(ValueError, match="no"):
        loop.run()
    assert runs(client(tmp_path))[0].info.status == "FAILED"


def test_without_packages_for_local_stores_the_error_names_them(client, monkeypatch):
    monkeypatch.setattr("hooks.writers.mlflow.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"sqlalchemy.*alembic"):
        MLflowWriter()
    MLflowWriter("http://localhost:5000")
