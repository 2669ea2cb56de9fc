"""Read a trace as a viewer does, and check what every trace promises."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """A slice on a track; times in nanoseconds since 1970 less the base."""

    begin: int
    end: int
    name: str
    kind: str


class Picture:
    """What a viewer shows of a file."""

    def __init__(self, path: Path) -> None:
        self.content: dict[str, Any] = json.loads(path.read_text())
        events = self.content["traceEvents"]
        self.events = events
        self.processes = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
        self.names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
        self.slices: dict[tuple[int, int], list[Seen]] = defaultdict(list)
        for one in events:
            if one["ph"] == "X":
                begin = round(one["ts"] * 1000)
                seen = Seen(begin, begin + round(one["dur"] * 1000), one["name"], one["cat"])
                self.slices[one["pid"], one["tid"]].append(seen)
        self.ends: dict[Any, dict[str, Any]] = defaultdict(dict)
        for one in events:
            if one["ph"] in "sf":
                self.ends[one["id"]][one["ph"]] = one

    def track(self, name: str) -> list[Seen]:
        """Return the slices of the only track of this name."""
        [key] = [key for key, given in self.names.items() if given == name]
        return self.slices[key]

    @property
    def iterations(self) -> list[int]:
        """The numbers of the iterations of the training track."""
        return [int(one.name.split()[1]) for one in self.track("training") if one.name.startswith("iteration ")]

    def counters(self, name: str) -> list[int]:
        """Return the values of a counter."""
        return [value for one in self.events if one["ph"] == "C" and one["name"] == name for value in one["args"].values()]

    def arrows(self, name: str) -> list[tuple[Seen, Seen]]:
        """Return the innermost slices at both ends of each arrow of a name."""
        found = [both for both in self.ends.values() if both["s"]["name"] == name]
        return [(self.at(both["s"]), self.at(both["f"])) for both in found]

    def at(self, end: dict[str, Any]) -> Seen:
        """Return the innermost slice that an end of an arrow lies on."""
        moment = round(end["ts"] * 1000)
        around = [one for one in self.slices[end["pid"], end["tid"]] if one.begin <= moment <= one.end]
        assert around, f"{end} lies on no slice"
        return max(around, key=lambda one: (one.begin, -one.end))

    def check(self) -> None:
        """Check what viewers need: known phases, a name for each track, slices nested or apart, arrows forward on slices."""
        assert isinstance(self.content["baseTimeNanoseconds"], int)
        for one in self.events:
            assert one["ph"] in "MXCsf"
            assert isinstance(one["pid"], int)
            if one["ph"] != "M":
                assert one["ts"] >= 0
        assert self.slices.keys() <= self.names.keys()
        assert {process for process, _ in self.names} <= self.processes.keys()
        for slices in self.slices.values():
            assert_nested(slices)
        for both in self.ends.values():
            assert both.keys() == {"s", "f"}
            assert both["s"]["ts"] <= both["f"]["ts"]
            assert both["f"]["bp"] == "e"
            self.at(both["s"])
            self.at(both["f"])


def assert_nested(slices: Any) -> None:
    """Fail if a slice partly overlaps another one."""
    around: list[int] = []
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        while around and around[-1] <= one.begin:
            around.pop()
        assert one.begin <= one.end
        assert not around or one.end <= around[-1], f"{one} partly overlaps the slice around it"
        around.append(one.end)
