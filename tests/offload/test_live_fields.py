"""Live fields of a user's events: an offloaded handler cannot see them, whatever their default is."""

import pytest

from eventloop import Bus, Event, Live, LiveFieldError, from_json, from_msgpack


class Masked(Event):
    share: float
    mask: Live[object]


class Faded(Event):
    share: float
    mask: Live[object] = None


@pytest.fixture(params=[Masked, Faded])
def got(request):
    """What an offloaded handler gets of an event with a mask."""
    bus, seen = Bus(), []
    bus.on(request.param, seen.append, offload="thread")
    with bus:
        bus.publish(request.param(share=0.5, mask=[1]))
    [event] = seen
    assert isinstance(event, request.param)
    return event


def test_an_offloaded_handler_gets_the_other_fields_and_can_encode_them(got):
    assert got.share == 0.5
    with pytest.raises(LiveFieldError, match="capture="):
        _ = got.mask
    assert b'"mask"' not in got.to_json()
    assert from_json(got.to_json()).share == 0.5
    assert from_msgpack(got.to_msgpack()).share == 0.5
