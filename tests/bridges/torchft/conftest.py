import os
from contextlib import ExitStack

import pytest

from . import groups


@pytest.fixture
def manager(monkeypatch):
    """Return a function that makes the manager of a replica group that is alone, with a lighthouse of its own."""
    monkeypatch.delenv("REPLICA_GROUP_ID", raising=False)
    with ExitStack() as stack:

        def make(replica_id: str | None = f"alone{os.getpid()}", **options):
            server = groups.lighthouse()
            stack.callback(server.shutdown)
            made = groups.manager(replica_id, lighthouse_addr=server.address(), **options)
            stack.callback(made.shutdown, wait=False)
            return made

        yield make
