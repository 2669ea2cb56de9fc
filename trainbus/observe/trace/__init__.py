"""Write a window of a run, thread by thread, to a trace file that Perfetto opens."""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.observe.trace.chrome import TraceError, merge, read_trace, write_trace
    from trainbus.observe.trace.record import Tracer
    from trainbus.observe.trace.tracks import Arrow, Counter, Slice, Track, nested
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Arrow", "Counter", "Slice", "TraceError", "Tracer", "Track", "merge", "nested", "read_trace", "write_trace"]
