"""A drawing of a file of ``TraceHook``: its tracks, slices and arrows, as a viewer shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from canvas import Canvas  # type: ignore[import-not-found]  # beside this file

ROW = 23
KINDS = {
    "iteration": "",
    "after_train_iter": "",
    "step": "",
    "forward": "green",
    "backward": "green",
    "optimizer step": "green",
}
"""Kinds of slices of the training thread, by their names without numbers. All others are amber, those of lanes blue."""


def draw(trace: Mapping[str, Any], *, narrow: bool = False) -> Canvas:
    """Return a drawing of the slices and arrows of a trace, up to a little after the end of its training.

    A narrow one has the names of the tracks above them.
    """
    width, left, above = (380, 8, 20) if narrow else (860, 136, 0)
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    begin = min(event["ts"] for event in slices)
    training = next(tid for tid in names if names[tid] == "training")
    end = 1.1 * max(event["ts"] + event["dur"] - begin for event in slices if event["tid"] == training) + begin
    scale = (width - left - 16) / (end - begin)
    depths = _depths(slices)
    deepest = {tid: max(depths[id(one)] for one in slices if one["tid"] == tid) for tid in names}
    tops, y = {}, 34.0
    for tid in names:
        y += above
        tops[tid] = y
        y += ROW * (deepest[tid] + 1) + 26
    canvas = Canvas(width, int(y) + (32 if narrow else 14), "A trace of some iterations")
    for ms in range(0, int((end - begin) / 1000) + 1, 5 if end - begin < 60_000 else 10):
        x = left + ms * 1000 * scale
        canvas.arrow((x, 24), (x, y - 18), kind="edge", head=False)
        canvas.text(x, 18, f"{ms} ms", anchor="middle" if ms or not narrow else "start", kind="dim")
    legend = ["grey: iterations, mount points · green: the model", "amber: hooks, waiting · blue: offloaded"]
    for number, line in enumerate(legend if narrow else [" · ".join(legend)]):
        canvas.text(left, y + 4 + 18 * number, line, kind="dim")
    for tid, name in names.items():
        canvas.text(8 if narrow else 12, tops[tid] + (-6 if narrow else 15), name.partition(".")[0], bold=True)
    for one in slices:
        x, width = left + (one["ts"] - begin) * scale, (min(end, one["ts"] + one["dur"]) - one["ts"]) * scale
        _slice(canvas, one, x, tops[one["tid"]] + ROW * depths[id(one)], width, names)
    for start, finish in _arrows(events):
        if finish["ts"] > end:
            continue
        x1, x2 = (left + (one["ts"] - begin) * scale for one in (start, finish))
        bottom = tops[start["tid"]] + ROW * (deepest[start["tid"]] + 1)
        canvas.arrow((x1, bottom), (x2, tops[finish["tid"]]), kind="blue", dashed=True)
    return canvas


def _slice(canvas: Canvas, event: Mapping[str, Any], x: float, y: float, width: float, names: Mapping[int, str]) -> None:
    if width < 1:
        return
    name = event["name"]
    training = names[event["tid"]] == "training"
    kind = KINDS.get(name.rstrip("0123456789 "), "amber") if training else "blue"
    canvas.rect(x, y, width, ROW - 3, 2, f"{kind}-fill" if kind else "paper", kind or "dim")
    shown = next((text for text in (name, name.partition(".")[0], name.split()[0]) if 6 * len(text) < width), "")
    canvas.text(x + width / 2, y + 14, shown, size=10, anchor="middle")


def _depths(slices: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return how many slices of the same track are around each."""
    depths, open_ends = dict[int, int](), dict[int, list[float]]()
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        ends = open_ends.setdefault(one["tid"], [])
        while ends and ends[-1] <= one["ts"]:
            ends.pop()
        depths[id(one)] = len(ends)
        ends.append(one["ts"] + one["dur"])
    return depths


def _arrows(events: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    return [(starts[event["id"]], event) for event in events if event["ph"] == "f" and event["id"] in starts]
