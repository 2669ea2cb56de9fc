"""A process that looks as if NVRx's ``ft_launcher`` had started it, with a client that only notes what it is asked."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from trainbus.hooks import heartbeat


class MonitorError(Exception):
    """As NVRx's RankMonitorClientError."""


class Client:
    """Stands for NVRx's client: notes the calls, and fails if it was told to."""

    CURRENT_TIMEOUTS_STATE_KEY = "current_timeouts"

    def __init__(self, limits):
        self.calls, self.fails, self.state = [], False, {}
        self.hb_timeouts = SimpleNamespace(initial=limits.get("initial"), subsequent=limits.get("subsequent"))
        self.section_timeouts = SimpleNamespace(section=limits.get("section", {}), out_of_section=None)

    def _note(self, call):
        if self.fails:
            raise MonitorError("gone")
        self.calls.append(call)

    def init_workload_monitoring(self):
        self._note("connect")

    def shutdown_workload_monitoring(self):
        self._note("leave")

    def send_heartbeat(self):
        self._note("beat")

    def start_section(self, section):
        self._note(section)

    def end_all_sections(self):
        self._note("end")

    def calculate_and_set_hb_timeouts(self, *, skip_if_not_ready):
        self.state["heartbeat"] = {"subsequent": 7.0}

    def calculate_and_set_section_timeouts(self, sections, *, calc_out_of_section, skip_if_not_ready):
        self._note(f"calculate {sections[0]}")

    def state_dict(self):
        return {"current_timeouts": dict(self.state)}

    def load_state_dict(self, state):
        self._note("load")
        self.state |= state["current_timeouts"]

    @property
    def beats(self):
        return self.calls.count("beat")


def launch(monkeypatch: pytest.MonkeyPatch, **limits: object) -> Client:
    """Have this process look so; return the client of all runs. ``limits`` are those of the launcher's configuration."""
    client = Client(limits or {"initial": 60.0, "subsequent": 3.0})
    nvrx = ModuleType("nvidia_resiliency_ext.fault_tolerance")
    nvrx.RankMonitorClient, nvrx.RankMonitorClientError = lambda: client, MonitorError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, nvrx.__name__, nvrx)
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "/nowhere")
    monkeypatch.setattr(heartbeat.INTERVAL, "value", 0.02)
    return client
