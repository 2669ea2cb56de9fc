"""One small training for each host; ``test_conformance.py`` runs, stops, breaks and resumes them all in the same way."""

import importlib

import pytest

from trainbus.testing import HostJob

HOSTS = ("own", "body", "toy", "lightning", "transformers", "ignite", "accelerate")

WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*does not have many workers",
        "You defined a `validation_step` but have no",
        ".*treespec",
        ".*You're resuming from a checkpoint that ended before the epoch ended",
        "Checkpoint directory .* exists and is not empty",
        ".*callbacks used to create the checkpoint need to be provided",
        "resuming reads and drops",  # loaders of Accelerate cannot skip
    )
]
"""Those of Lightning about jobs as small as these, and of Accelerate."""


def job_of(host: str) -> type[HostJob]:
    """Return the job of a host."""
    job: type[HostJob] = importlib.import_module(f"{__name__}.{host}").Job
    return job


def hosts(*without: str) -> pytest.MarkDecorator:
    """Run a test in all hosts but some, with the fixture ``host``."""
    return pytest.mark.parametrize("host", [name for name in HOSTS if name not in without], indirect=True)
