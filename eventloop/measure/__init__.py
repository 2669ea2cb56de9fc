"""What records: spans of any thread. It knows no bus; ``observe`` interprets what is recorded."""

from trainbus.eventloop.measure.spans import Recorder, Spans

__all__ = ["Recorder", "Spans"]
