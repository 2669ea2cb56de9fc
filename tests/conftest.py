from collections.abc import Iterator

import pytest

from eventloop import Event, events


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    """The event loop of a bus, both kinds."""
    return request.param


@pytest.fixture
def registry() -> Iterator[dict[str, type[Event]]]:
    """The registry of mount points, as it was afterwards."""
    before = dict(events.registry)
    yield events.registry
    events.registry.clear()
    events.registry.update(before)
