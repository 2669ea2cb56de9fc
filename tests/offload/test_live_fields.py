"""Live fields of a user's events: an offloaded handler cannot see them, whatever their default is."""

import pytest

from eventloop import Bus, Event, Live, LiveFieldError, from_json, from_msgpack


class Masked(Event):
    share: float
    mask: Live[object]


class Faded(Event):
    share: float
    mask: Live[object] = None


@pytest.mark.parametrize("event", [Masked, Faded])
def test_an_offloaded_handler_gets_the_other_fields(event):
    bus, seen = Bus(), []
    bus.on(event, seen.append, offload="thread")
    with bus:
        bus.publish(event(share=0.5, mask=[1]))
    [got] = seen
    assert isinstance(got, event)
    assert got.share == 0.5
    with pytest.raises(LiveFieldError, match="capture="):
        _ = got.mask


@pytest.mark.parametrize("event", [Masked, Faded])
def test_what_it_gets_is_encoded_without_them_and_decoded(event):
    bus, seen = Bus(), []
    bus.on(event, seen.append, offload="thread")
    with bus:
        bus.publish(event(share=0.5, mask=[1]))
    assert b'"mask"' not in seen[0].to_json()
    assert from_json(seen[0].to_json()).share == 0.5
    assert from_msgpack(seen[0].to_msgpack()).share == 0.5
