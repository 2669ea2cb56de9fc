"""Write, read and merge trace files in Chrome's JSON format, which Perfetto, chrome://tracing and speedscope open.

Each file names the origin of its times: ``ts`` is in microseconds since ``baseTimeNanoseconds``, which is in nanoseconds since
1970, as in the files of ``torch.profiler``. So files of several ranks and of torch's profiler merge into one picture.

Precision:

- Within one file, all times are of one clock, exact to 0.1 µs.
- Files of one machine fit together to a few microseconds; files of torch's profiler to about 10 µs.
- Files of several machines fit together as well as their clocks agree: to about a millisecond with NTP.

``otherData`` has both clocks at the begin and at the end of the window, which shows corrections of the machine's clock.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, NotRequired, TypedDict, cast

import msgspec
import orjson
from msgspec import Meta

from trainbus.eventloop.checkpoint import commit_bytes
from trainbus.eventloop.errors import TrainbusError
from trainbus.eventloop.plain import as_json
from trainbus.observe.trace.tracks import Arrow, Counter, Track

_TOGETHER: Final = 256  # events encoded at once
_FLOWS: Final = ("s", "t", "f")
_BASE: Final = "baseTimeNanoseconds"


class TraceError(TrainbusError):
    """A file is not a trace, or its clock is unknown."""


def write_trace(
    path: Path,
    process: tuple[int, str],
    tracks: Sequence[Track],
    arrows: Iterable[Arrow],
    counters: Iterable[Counter],
    clock: tuple[int, int],
    facts: Mapping[str, Any],
    rest: Callable[[], object] = lambda: None,
) -> None:
    """Write a trace, atomically.

    Args:
        path: the file to write.
        process: number (the rank) and name of the process.
        tracks: the threads of the process, in order.
        arrows: arrows between slices of the tracks.
        counters: numbers by time.
        clock: the moment that becomes time 0, in ns of the tracks' clock and in ns since 1970.
        facts: the content of ``otherData``.
        rest: called regularly, so that other threads can run.
    """
    events = _events(process, tracks, arrows, counters, clock[0])
    commit_bytes(path, b"".join(_joined(map(as_json, events), {_BASE: clock[1], "otherData": facts}, rest)))


def read_trace(path: Path, most: int = 1 << 30) -> dict[str, Any]:
    """Read a trace in Chrome's format, plain or compressed by gzip, of at most so many bytes when decompressed.

    Raises:
        TraceError: the file cannot be read, is not a trace, is damaged, or is larger than ``most``.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise TraceError(f"{path} is not a regular file; name a trace")
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if compressed else path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise TraceError(f"{path} has more than {most:,} bytes; trace fewer iterations")
        trace = orjson.loads(data)
        if isinstance(trace, list):
            trace = {"traceEvents": trace}
        msgspec.convert(trace, _Trace)
    except (OSError, EOFError, zlib.error, orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise TraceError(f"{path} is not a trace in Chrome's JSON format: {error}") from None
    return cast("dict[str, Any]", trace)


_Time = Annotated[float, Meta(ge=-1e16, le=1e16)]
_Integer = Annotated[int, Meta(ge=-(2**53), le=2**53)]


class _Event(TypedDict, total=False):
    """The fields that :func:`merge` reads."""

    ph: str
    ts: _Time
    pid: _Integer | str
    id: int | str
    cat: str
    name: str


class _Trace(TypedDict):
    traceEvents: list[_Event]
    baseTimeNanoseconds: NotRequired[Annotated[int, Meta(ge=0, le=2**62)]]
    otherData: NotRequired[dict[str, Any]]


def merge(traces: Mapping[str, dict[str, Any]]) -> bytes:
    """Merge several traces into one with a common origin of time; ``traces`` are by name, such as the path of the file.

    Processes with equal numbers get new ones. The times of trainbus's files and of torch's profiler are aligned.

    Raises:
        TraceError: a trace lacks the origin of its times, or has too many levels.
    """
    for name, trace in traces.items():
        if _BASE not in trace:
            raise TraceError(
                f"{name} lacks the origin of its times ({_BASE}), so it cannot be aligned with the others; merge files of "
                "TraceHook and of torch.profiler (torch 2.4 or later)"
            )
    begin = min(trace[_BASE] + _first(trace) for trace in traces.values())
    lines: list[bytes] = []
    facts: dict[str, orjson.Fragment] = {}
    taken: set[Any] = set()
    flows: dict[tuple[Any, ...], int] = {}
    for index, (name, trace) in enumerate(traces.items()):
        processes: dict[Any, Any] = {}
        try:
            for event in trace["traceEvents"]:
                if (process := event.get("pid")) is not None and process not in processes:
                    processes[process] = _free(process, taken | set(processes.values()))
                lines.append(orjson.dumps(_moved(event, trace[_BASE] - begin, index, processes, flows)))
            facts[name] = orjson.Fragment(orjson.dumps(trace.get("otherData", {})))
        except orjson.JSONEncodeError as error:  # it writes fewer levels than it reads
            raise TraceError(f"{name} cannot be merged: {error}") from None
        taken |= set(processes.values())
    return b"".join(_joined(lines, {_BASE: begin, "otherData": {"merged": facts}}, lambda: None))


def _first(trace: Mapping[str, Any]) -> int:
    return min(
        (round(event["ts"] * 1000) for event in trace["traceEvents"] if "ts" in event and event.get("ph") != "M"), default=0
    )


def _free(process: Any, taken: set[Any]) -> Any:
    if process not in taken:
        return process
    if isinstance(process, str):
        return next(name for number in range(2, len(taken) + 3) if (name := f"{process} {number}") not in taken)
    return max((one for one in taken if isinstance(one, int)), default=0) + 1


def _moved(
    event: dict[str, Any], later: int, index: int, processes: Mapping[Any, Any], flows: dict[tuple[Any, ...], int]
) -> dict[str, Any]:
    moved = dict(event)
    if "pid" in moved:
        moved["pid"] = processes[moved["pid"]]
    if "ts" in moved:
        moved["ts"] = (round(moved["ts"] * 1000) + later) / 1000
    if moved.get("ph") in _FLOWS and "id" in moved:
        moved["id"] = flows.setdefault((index, moved.get("cat"), moved.get("name"), moved["id"]), len(flows) + 1)
    return moved


def _events(
    process: tuple[int, str], tracks: Sequence[Track], arrows: Iterable[Arrow], counters: Iterable[Counter], zero: int
) -> Iterator[dict[str, Any]]:
    number, title = process

    def meta(kind: str, track: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": number, "tid": track, "args": args}

    yield meta("process_name", 1, name=title)
    yield meta("process_sort_index", 1, sort_index=number)
    # Perfetto takes thread 0 for the idle thread.
    for index, track in enumerate(tracks, 1):
        yield meta("thread_name", index, name=track.name)
        yield meta("thread_sort_index", index, sort_index=index)
        for begin, end, name, kind in track.slices:
            times = {"ts": (begin - zero) / 1000, "dur": (end - begin) / 1000}
            yield {"ph": "X", "name": name, "cat": kind, "pid": number, "tid": index, **times}
    for flow, arrow in enumerate(arrows, 1):
        same = {"name": arrow.name, "cat": arrow.name, "id": flow, "pid": number}
        yield {"ph": "s", **same, "tid": arrow.source + 1, "ts": (arrow.at - zero) / 1000}
        yield {"ph": "f", "bp": "e", **same, "tid": arrow.target + 1, "ts": (arrow.until - zero) / 1000}
    for counter in counters:
        for at, value in counter.values:
            yield {"ph": "C", "name": counter.name, "pid": number, "ts": (at - zero) / 1000, "args": {counter.unit: value}}


def _joined(lines: Iterable[bytes], header: Mapping[str, Any], rest: Callable[[], object]) -> Iterator[bytes]:
    yield as_json({"displayTimeUnit": "ms", **header})[:-1] + b',"traceEvents":[\n'
    waiting = iter(lines)
    separator = b""
    while together := list(islice(waiting, _TOGETHER)):
        yield separator + b",\n".join(together)
        separator = b",\n"
        rest()
    yield b"\n]}\n"
