"""What orders the training, the copies and the readers of a device cannot be left out: a test fails."""

import subprocess
import sys

import pytest

from . import mutations
from .conftest import TAKEN


def test_the_table_names_what_is_in_the_modules():
    for mutation in mutations.MUTATIONS:
        assert compile(mutations.mutated(mutation), mutation.module, "exec")


@pytest.mark.long
@TAKEN
def test_a_test_fails_without_them():
    """One of them here; ``python -m tests.device.mutations`` tries all."""
    command = [sys.executable, "-m", "tests.device.mutations", "16"]
    done = subprocess.run(command, cwd=mutations.ROOT, capture_output=True, text=True, timeout=150)  # noqa: S603 - ours
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1), done.stdout + done.stderr
