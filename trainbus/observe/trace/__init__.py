"""Write a window of a run, thread by thread, to a trace file that Perfetto opens."""

from trainbus.observe.trace.chrome import TraceError, merge, read_trace, write_trace
from trainbus.observe.trace.record import Tracer
from trainbus.observe.trace.tracks import Arrow, Counter, Slice, Track, nested

__all__ = ["Arrow", "Counter", "Slice", "TraceError", "Tracer", "Track", "merge", "nested", "read_trace", "write_trace"]
