"""What every host keeps, in torchtitan."""

import pytest

from trainbus.testing import HostChecks

pytest.importorskip("torchtitan.trainer")

from .job import Job


class TestTorchtitan(HostChecks):
    job = Job
