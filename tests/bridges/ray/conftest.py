import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
BUCKET = "bucket"
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_DEDUP_LOGS": "0",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Three nodes of Ray on this machine, which start once: the head, and two with a core each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(VARIABLES)
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        found.add_node(num_cpus=1)
        found.add_node(num_cpus=1)
        ray.init(address=found.address, runtime_env={"env_vars": VARIABLES}, log_to_driver=False)
        found.wait_for_nodes()
        yield found
    finally:
        ray.shutdown()
        found.shutdown()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def fit(cluster: Any, tmp_path: Path) -> Callable[..., Any]:
    """Train in Ray, by default ``jobs.train``; return Ray's Result. The log of the workers is ``tmp_path / "log.jsonl"``."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from . import jobs

    def fit(
        train: str = "train",
        workers: int | tuple[int, int] = 2,
        keep: CheckpointConfig | None = None,
        datasets: dict[str, Any] | None = None,
        store: Any = None,
        failures: int = -1,
        **config: Any,
    ) -> Any:
        return TorchTrainer(
            getattr(jobs, train),
            datasets=datasets,
            train_loop_config={"log": str(tmp_path / "log.jsonl"), **config},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                storage_path=f"{BUCKET}/runs" if store else str(tmp_path / "store"),
                storage_filesystem=store,
                name="x",
                failure_config=FailureConfig(max_failures=failures),
                checkpoint_config=keep or CheckpointConfig(),
            ),
        ).fit()

    return fit
