"""Write scalars, images, histograms and texts to MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

import msgspec

from trainbus.eventloop import ConfigurationError, check_options, get_logger
from trainbus.eventloop.registry import register
from trainbus.hooks.options import Name, PositiveInt
from trainbus.hooks.writers.base import Image, RunFacts, Where, Writer, load
from trainbus.hooks.writers.files import run_id
from trainbus.hooks.writers.histogram import BinCounts

log = get_logger()

_MOST_METRICS, _MOST_PARAMS = 1000, 100  # per call: MLflow's limits
_LONGEST = 6000  # characters of a parameter's value
_LONGEST_NAME = 250

_ID = "mlflow_run_id"  # file with the id of the run


@register
class MLflowWriter(Writer):
    """Write to a run in an MLflow store, by default ``<work_dir>/mlflow.db``; needs the extra ``mlflow``.

    To view it, run ``mlflow ui --backend-store-uri sqlite:///<work_dir>/mlflow.db`` (from the full mlflow package).

    - A resumed run continues the MLflow run whose id is in ``<work_dir>/mlflow_run_id``. Repeated iterations appear twice in a
      metric's history.
    - The configuration becomes parameters with dotted names. MLflow cannot change a parameter, so the writer logs a change.
    - Histograms and texts are artifacts: ``histograms/<name>/<step>.json`` and ``texts/<name>/<step>.txt``.
    - MLflow stores infinity as the largest double. Characters that it does not allow in names become ``_``.
    - Give a slow server its own ``LoggerHook``, because the writers of one ``LoggerHook`` wait for each other.

    Args:
        tracking_uri: address of a server or of another store (``sqlite:///mlflow.db`` for several runs). With the default,
            nothing is written without a work dir.
        experiment: name of the experiment, which is created if it does not exist.
        interval: iterations between training scalars; None uses the logger's.

    Raises:
        ConfigurationError: MLflow or a package for local stores is not installed, or an option is invalid.
    """

    of_run: ClassVar = dict.fromkeys(("_client", "_id", "_metrics"))

    @check_options
    def __init__(
        self, tracking_uri: Name | None = None, *, experiment: Name = "trainbus", interval: PositiveInt | None = None
    ) -> None:
        super().__init__(interval)
        # MLflow needs PIL for images.
        self._mlflow, self._entities, _ = load("MLflowWriter", "MLflow", "mlflow", "mlflow.entities", "PIL")
        local = tracking_uri is None or tracking_uri.startswith("sqlite:")
        missing = [name for name in ("sqlalchemy", "alembic") if local and find_spec(name) is None]
        if missing:
            raise ConfigurationError(
                f'MLflow needs {" and ".join(missing)} for a local store: pip install "trainbus[mlflow]", or give a '
                "tracking_uri="
            )
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.needs_work_dir = tracking_uri is None

    def in_check(self) -> Writer | None:
        return self if self.tracking_uri is None else None

    def files(self) -> Collection[str]:
        return (_ID,)

    def open(self, run: RunFacts) -> None:
        uri, artifacts = self.tracking_uri, None
        if uri is None:
            folder = run.folder.resolve()
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow").as_uri()
        client = self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        self._metrics: list[Any] = []
        self._failed = False

        def make() -> str:
            found = client.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else client.create_experiment(self.experiment, artifacts)
            return str(client.create_run(experiment, run_name=run.name).info.run_id)

        def exists(known: str) -> bool:
            try:
                client.get_run(known)
            except self._mlflow.MlflowException:
                return False
            return True

        self._id = run_id(run.work_dir, _ID, make, exists)
        client.update_run(self._id, status="RUNNING")

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        now, metric = time.time_ns() // 1_000_000, self._entities.Metric
        self._metrics += [metric(_name(name), float(value), now, step) for name, value in scalars.items()]

    def write_reported(self, name: str, value: Image | BinCounts | str, step: int, where: Where) -> None:
        if isinstance(value, str):
            self._client.log_text(self._id, value, f"texts/{_name(name)}/{step}.txt")
        else:
            super().write_reported(name, value, step, where)

    def write_image(self, name: str, image: Image, step: int) -> None:
        self._client.log_image(self._id, image, key=_name(name), step=step)

    def write_histogram(self, name: str, histogram: BinCounts, step: int) -> None:
        content = msgspec.to_builtins(histogram)
        self._client.log_dict(self._id, content, f"histograms/{_name(name)}/{step}.json")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Set the parameters that the run does not have yet."""
        params = {_name(name): str(value)[:_LONGEST] for name, value in _flat(config)}
        known = self._client.get_run(self._id).data.params
        changed = sorted(name for name in params.keys() & known.keys() if params[name] != known[name])
        if changed:
            log.warning(
                "MLflow cannot change the parameters of a run and keeps the first values",
                id="mlflow-parameters-changed",
                parameters=changed,
            )
        new = [self._entities.Param(name, value) for name, value in params.items() if name not in known]
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + _MOST_PARAMS])

    def flush(self) -> None:
        while self._metrics:
            self._client.log_batch(self._id, metrics=self._metrics[:_MOST_METRICS])
            del self._metrics[:_MOST_METRICS]

    def aborted(self) -> None:
        self._failed = True

    def close(self) -> None:
        self._client.set_terminated(self._id, status="FAILED" if self._failed else "FINISHED")


def _name(name: str) -> str:
    """Return a name that MLflow takes: a relative path without empty parts, of at most 250 characters."""
    parts = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:_LONGEST_NAME].split("/")
    return "/".join("_" * max(1, len(part)) if part in ("", ".", "..") else part for part in parts)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
