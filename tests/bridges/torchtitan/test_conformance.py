"""What every host keeps, in torchtitan."""

import pytest

from trainbus.testing import HostChecks

pytest.importorskip("torchtitan.trainer")

from .job import WARNINGS, Job

pytestmark = WARNINGS


class TestTorchtitan(HostChecks):
    job = Job
