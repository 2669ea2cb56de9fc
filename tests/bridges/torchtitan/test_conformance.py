"""What every host keeps, in torchtitan."""

import pytest

from trainbus.testing import HostChecks

pytest.importorskip("torchtitan.trainer")

from trainbus import TrainbusCheckpointManager

from .job import WARNINGS, Job

pytestmark = WARNINGS


class TestTorchtitan(HostChecks):
    job = Job


class OwnJob(Job):
    manager = TrainbusCheckpointManager


class TestOwnCheckpoints(HostChecks):
    """The same with our checkpointer in the configuration."""

    job = OwnJob
