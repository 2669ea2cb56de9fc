"""The groups of tests that run alone are seen by pytest-xdist, which says so in their ids."""

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_this_test_is_in_the_group_of_those_that_run_alone(request):
    assert request.node.nodeid.endswith("@alone"), "pytest-xdist does not group tests: this version of pytest is too new for it"
