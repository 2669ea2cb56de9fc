"""MLflow: metrics to a folder on this machine."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions need to know that this is a folder

import mlflow

from benchmarks.peers import Logged, Statement

logging.getLogger("mlflow").setLevel(logging.WARNING)


@contextmanager
def logs(work_dir: Path, scalars: Mapping[str, object]) -> Iterator[Logged]:
    mlflow.set_tracking_uri(work_dir.as_uri())
    mlflow.set_experiment("benchmark")
    with mlflow.start_run():
        code = "log_metrics({name: float(value) for name, value in scalars.items()}, step=7)"
        yield Logged(Statement(code, {"log_metrics": mlflow.log_metrics, "scalars": scalars}))


LOGS = {"MLflow file store": logs}
