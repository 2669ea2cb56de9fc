"""Scalars and images for MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from eventloop import ConfigurationError, check_options, get_logger, register
from hooks.options import Name, PositiveInt
from hooks.writers.base import Image, RunFacts, Where, Writer
from hooks.writers.identity import run_id

log = get_logger()

_MOST_METRICS = 1000  # in one call, says MLflow
_MOST_PARAMS = 100
_LONGEST = 6000  # characters of a parameter's value


@register
class MLflowWriter(Writer):
    """A run in an MLflow store, by default a local one: ``<work_dir>/mlflow.db``; needs the extra ``mlflow``.

    Look at it with ``mlflow ui --backend-store-uri sqlite:///<work_dir>/mlflow.db`` (that takes the whole of mlflow). Metrics
    are written many at a time, when the logger flushes. A resumed run goes on with the run whose id is noted in
    ``<work_dir>/mlflow_run_id``; iterations that are made again come twice in a metric's history. The configuration
    becomes parameters, with dotted names. MLflow cannot change a parameter: what a resumed run has otherwise is reported. Its
    databases hold NaN, but the largest double for infinity. Characters that MLflow does not allow in names become ``_``.

    Making a store takes some seconds, and a server may not answer: all writers of one ``LoggerHook`` wait for each other, so
    what is slow can have a ``LoggerHook`` of its own.

    Args:
        tracking_uri: of another store, such as one that several runs share (``sqlite:///mlflow.db``) or a server's
            address. With the default, nothing is written without a work dir.
        experiment: its name; made if it is not there.
        interval: iterations between training scalars; None takes the logger's.

    Raises:
        ConfigurationError: MLflow is not installed or lacks what a local store needs, an empty option, or an interval that is
            not positive.
    """

    @check_options
    def __init__(
        self, tracking_uri: Name | None = None, *, experiment: Name = "trainbus", interval: PositiveInt | None = None
    ) -> None:
        super().__init__(interval)
        _load(tracking_uri)  # now, and not once the run is under way
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self._client: Any = None
        self._id = ""
        self._metrics: list[Any] = []
        self._failed = False

    def open(self, run: RunFacts) -> None:
        """Begin a run, or go on with that of the work dir."""
        uri, artifacts = self.tracking_uri, None
        if uri is None:
            if run.work_dir is None:
                return
            place = run.work_dir.resolve()
            place.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{place / 'mlflow.db'}", (place / "mlflow").as_uri()
        mlflow = _load(uri)
        client = mlflow.MlflowClient(tracking_uri=uri)
        self._metrics, self._failed = [], False
        self._id = run_id(
            run.work_dir,
            "mlflow_run_id",
            lambda: self._create(client, run, artifacts),
            lambda known: _has(client, known, mlflow.MlflowException),
        )
        client.update_run(self._id, status="RUNNING")
        self._client = client

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        """Keep them for the next flush."""
        if self._client is not None:
            now = time.time_ns() // 1_000_000
            metric = _load(self.tracking_uri).entities.Metric
            self._metrics += [metric(_name(name), float(value), now, step) for name, value in scalars.items()]

    def write_image(self, name: str, image: Image, step: int) -> None:
        """Store an artifact that MLflow shows as an image of its step."""
        if self._client is not None:
            self._client.log_image(self._id, image, key=_name(name), step=step)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Set the run's parameters, those that it does not have yet."""
        if self._client is None:
            return
        params = {_name(name): str(value)[:_LONGEST] for name, value in _flat(config)}
        known = self._client.get_run(self._id).data.params
        changed = sorted(name for name in params.keys() & known.keys() if params[name] != known[name])
        if changed:
            log.warning("MLflow cannot change parameters of a run: it keeps the first", parameters=changed)
        param = _load(self.tracking_uri).entities.Param
        new = [param(name, value) for name, value in params.items() if name not in known]
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + _MOST_PARAMS])

    def flush(self) -> None:
        """Write the metrics that were kept."""
        while self._metrics:
            self._client.log_batch(self._id, metrics=self._metrics[:_MOST_METRICS])
            del self._metrics[:_MOST_METRICS]

    def aborted(self) -> None:
        """Note that the run has failed."""
        self._failed = True

    def close(self) -> None:
        """Finish the run."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._id, status="FAILED" if self._failed else "FINISHED")

    def _create(self, client: Any, run: RunFacts, artifacts: str | None) -> str:
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment, artifact_location=artifacts)
        made: str = client.create_run(experiment, run_name=run.name).info.run_id
        return made


def _has(client: Any, known: str, missing: type[Exception]) -> bool:
    try:
        client.get_run(known)
    except missing:
        return False
    return True


def _load(uri: str | None) -> Any:
    try:
        import mlflow
        import mlflow.entities
        import PIL  # noqa: F401 - MLflow takes images only with it
    except ImportError as error:
        raise ConfigurationError(f'MLflowWriter needs MLflow ({error}): pip install "trainbus[mlflow]"') from error
    local = uri is None or uri.startswith("sqlite:")
    missing = [name for name in ("sqlalchemy", "alembic") if local and find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f'MLflow needs {" and ".join(missing)} for a local store: pip install "trainbus[mlflow]", or give a tracking_uri='
        )
    return mlflow


def _name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
