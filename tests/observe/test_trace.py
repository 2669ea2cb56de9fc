"""Traces: slices that are nested or apart, and files of several processes in one, with one clock."""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import time

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainbus.cli import main
from trainbus.hooks import ProfilerHook
from trainbus.observe import TraceHook
from trainbus.observe.trace import Slice, TraceError, Track, merge, nested, read_trace, write_trace
from trainbus.observe.trace.tracks import Tracks, Window

from ..hooks.conftest import make_loop
from ..ranks.conftest import on_ranks
from .traces import Picture, assert_nested

SECOND = 1_000_000_000


def made(path, *, rank=0, begin=0, wall=SECOND, name="work"):
    """Write a trace with one slice of 5 µs that begins 1 µs after its clock."""
    tracks = [Track("training", [Slice(begin + 1000, begin + 6000, name, "hook")])]
    write_trace(path, (rank, f"rank {rank}"), tracks, [], [], (begin, wall), {})
    return path


intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted), max_size=30)


@given(intervals, st.sampled_from([1, 10, 1000]))
def test_slices_never_partly_overlap_also_where_a_viewer_rounds(pairs, unit):
    slices = nested(Slice(begin * unit, end * unit, "one", "hook") for begin, end in pairs)
    assert_nested(slices)
    for rounded in (lambda us: int(us * 1000), lambda us: round(us * 1000), lambda us: us):
        read = [(rounded(one.begin / 1000), rounded((one.end - one.begin) / 1000)) for one in slices]
        assert_nested([Slice(begin, begin + length, "one", "hook") for begin, length in read])


@given(intervals)
def test_slices_that_are_nested_or_apart_stay_where_they_are(pairs):
    proper: list[Slice] = []
    for begin, end in pairs:
        one = Slice(begin * 1000, end * 1000, "one", "hook")
        if begin < end and all(_apart(one, other) or _within(one, other) or _within(other, one) for other in proper):
            proper.append(one)
    made = nested(proper)
    assert len(made) == len(proper)
    for one, other in zip(made, sorted(proper, key=lambda one: (one.begin, -one.end)), strict=True):
        assert 0 <= one.begin - other.begin <= 10 * len(proper)
        assert 0 <= other.end - one.end <= 10 * len(proper)


def _apart(one, other):
    return one.end <= other.begin or other.end <= one.begin


def _within(one, other):
    return other.begin <= one.begin and one.end <= other.end


NAMES = [f"{when}_{what}" for what in ("train_iter", "forward", "val") for when in ("before", "after")] + ["after_train_epoch"]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(0, 99), st.integers(0, 99)), max_size=40))
def test_lost_spans_leave_tracks_without_partial_overlap(rows):
    spans = [(number, name, thread, min(times), max(times)) for number, (name, thread, *times) in enumerate(rows)]
    table = np.array(spans, np.int64).reshape(-1, 5)
    window = Window(table, NAMES, [(1, 5, 9, 0)], {}, training=1, first=0, begin=0, iterations=3)
    for track in Tracks(window, lambda: None).tracks:
        assert_nested(track.slices)


def test_merging_aligns_clocks_that_have_nothing_in_common(tmp_path):
    first = made(tmp_path / "a.json", rank=0, begin=123, wall=10 * SECOND, name="a")
    second = made(tmp_path / "b.json", rank=1, begin=9 * SECOND, wall=10 * SECOND + 2_000, name="b")
    picture = merged(tmp_path, first, second)
    assert picture.processes == {0: "rank 0", 1: "rank 1"}
    [[a], [b]] = picture.slices.values()
    assert (b.begin - a.begin, a.end - a.begin) == (2_000, 5_000)
    assert picture.content["baseTimeNanoseconds"] + a.begin == 10 * SECOND + 1000


def merged(folder, *paths):
    """Merge files by the command, and return the checked picture."""
    assert main(["trace", "merge", *map(str, paths), "-o", str(folder / "merged.json")]) == 0
    picture = Picture(folder / "merged.json")
    picture.check()
    return picture


def test_a_file_is_merged_over_only_with_force(tmp_path, capsys):
    (tmp_path / "trace.json").write_text(json.dumps(GOOD))
    (tmp_path / "mine.json").write_text("mine")
    command = ["trace", "merge", str(tmp_path / "trace.json"), "--out", str(tmp_path / "mine.json")]
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert "traceEvents" in json.loads((tmp_path / "mine.json").read_text())


def test_processes_and_arrows_with_equal_numbers_stay_apart(tmp_path):
    for name in "ab":
        bus_loop = make_loop(TraceHook(first=2, iterations=3), work_dir=tmp_path / name)
        bus_loop.bus.on("after_train_iter", print, offload="thread", capture=lambda event: "")
        bus_loop.run()
    one = Picture(tmp_path / "a" / "trace.json")
    picture = merged(tmp_path, tmp_path / "a" / "trace.json", tmp_path / "b" / "trace.json")
    assert len(picture.processes) == 2
    assert len(picture.ends) == 2 * len(one.ends)


def test_the_profile_of_torch_and_the_trace_are_one_picture_on_one_time_axis(tmp_path):
    profiler = ProfilerHook(by_epoch=False, profile_times=8, activities="cpu", json_trace_path="profile.json")
    make_loop(profiler, TraceHook(first=4, iterations=3), work_dir=tmp_path).run()
    content = orjson.loads(merge({name: read_trace(tmp_path / name) for name in ("trace.json", "profile.json")}))
    events = [one for one in content["traceEvents"] if one["ph"] == "X"]
    times = [(one["ts"], one["ts"] + one["dur"]) for one in events if one["name"] == "aten::linear"]
    forwards = [one["ts"] for one in events if one["name"] == "forward"]
    assert (len(times), len(forwards)) == (16, 3)
    # Torch's clock agrees to some microseconds; other zeros of time would be days apart.
    assert min(begin for begin, _ in times) - 100_000 < forwards[0] < forwards[2] < max(end for _, end in times) + 100_000


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="pipe is not a regular file"):
        read_trace(tmp_path / "pipe")


def test_a_compressed_file_is_read(tmp_path):
    path = made(tmp_path / "a.json")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(tmp_path / "a.json.gz") == read_trace(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\x1f\x8bno", b'{"traceEvents": 3}'])
def test_a_file_that_is_no_trace_is_an_error_that_names_it(tmp_path, content, capsys):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(TraceError, match=r"bad\.json"):
        read_trace(tmp_path / "bad.json")
    assert main(["trace", "merge", str(tmp_path / "bad.json"), "-o", str(tmp_path / "c.json")]) == 2
    assert "bad.json" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()
    assert main(["trace", "merge", str(tmp_path / "gone.json")]) == 2
    assert "gone.json: no such file" in capsys.readouterr().err
    assert main(["trace", "merge"]) == 2
    (tmp_path / "other.json").write_text('{"traceEvents": []}')  # of unknown time
    with pytest.raises(TraceError, match=r"other\.json"):
        merge({"other.json": read_trace(tmp_path / "other.json")})


GOOD = {"baseTimeNanoseconds": 1, "traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "ts": 1.5, "name": "a"}]}


DEEP = functools.reduce(lambda inner, _: [inner], range(500), 0)


@pytest.mark.parametrize(
    ("event", "status"),
    [
        *(({"ts": "soon"}, 2), ({"ts": 1e300}, 2), ({"pid": [1]}, 2), ({"pid": 2**63}, 2), ({"id": {}}, 2)),
        *(({"args": {"x": DEEP}}, 2), (3, 2), ({}, 0)),
    ],
    ids=range(8),
)
def test_fields_that_are_damaged_are_an_error_that_names_the_file(tmp_path, event, status, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(GOOD | {"traceEvents": [event]}))
    assert main(["trace", "merge", str(bad), str(bad), "-o", str(tmp_path / "out.json")]) == status
    assert ("bad.json" in capsys.readouterr().err) == bool(status)


@pytest.mark.parametrize("place", range(0, 100, 7))
def test_a_flipped_bit_in_a_compressed_file_is_an_error_that_names_it(tmp_path, place):
    content = bytearray(gzip.compress(orjson.dumps(GOOD), mtime=0))
    content[place % len(content)] ^= 16
    (tmp_path / "bad.json.gz").write_bytes(content)
    try:
        assert read_trace(tmp_path / "bad.json.gz") == GOOD  # a field of the header that gzip does not verify
    except TraceError as error:
        assert "bad.json.gz" in str(error)


def test_a_file_that_is_too_large_is_an_error_whether_it_is_compressed_or_not(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b" " * 100_000))
    (tmp_path / "a.json").write_bytes(b" " * 100_000)
    for name in ("a.json", "a.json.gz"):
        with pytest.raises(TraceError, match=f"{re.escape(name)}.*99,999"):
            read_trace(tmp_path / name, most=99_999)


def train(folder):
    torch.set_num_threads(1)
    make_loop(TraceHook(first=2, iterations=3), work_dir=folder).run()
    return time.time_ns()


@pytest.mark.long
def test_each_rank_writes_its_own_trace_and_they_merge(tmp_path):
    outcomes = on_ranks(train, tmp_path / "run", folder=tmp_path)
    assert [one.exitcode for one in outcomes] == [0, 0]
    picture = merged(tmp_path, *(tmp_path / "run" / f"trace.rank{rank}.json" for rank in (0, 1)))
    assert picture.processes == {0: "rank 0 of run", 1: "rank 1 of run"}
    for rank in (0, 1):
        training = next(slices for (process, track), slices in picture.slices.items() if (process, track) == (rank, 1))
        assert [one.name for one in training if one.name.startswith("iter")] == ["iteration 2", "iteration 3", "iteration 4"]
    base = picture.content["baseTimeNanoseconds"]
    last = max(one.end for slices in picture.slices.values() for one in slices)
    assert min(one.value for one in outcomes) - 60 * SECOND < base + last <= max(one.value for one in outcomes)
