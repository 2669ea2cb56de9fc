"""``RunRecordHook``: write the files that ``trainbus report`` and ``trainbus runs`` read."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

import msgspec

from eventloop import Hook, Priority, check_options, get_logger, mount, register
from eventloop import events as ev
from eventloop.checkpoint import free_name
from eventloop.observe import (
    FACTS,
    RECORD,
    Costs,
    RankCosts,
    RunFacts,
    RunFolderError,
    RunState,
    Session,
    encode_line,
    environment,
    read_facts,
    write_facts,
)
from hooks.copies import CopiedAnew
from hooks.writers import base
from hooks.writers.files import FileWriter

log = get_logger()


def _noted(event: Any) -> dict[str, Any]:
    """Pick the fields for the line of an event, on the training thread."""
    if isinstance(event, ev.CostsMeasured):
        return {"time": time.time(), "kind": "costs", "costs": event.costs}
    if isinstance(event, ev.RanksMeasured):
        return {"time": time.time(), "kind": "ranks", "ranks": event.ranks}
    progress = event.progress
    noted = {"time": time.time(), "kind": event.mount_point, "epoch": progress.epoch, "iter": progress.iter}
    match event:
        case ev.BeforeRun():
            run = event.run
            facts = {"name": run.name, "seed": run.seed, "config": dict(run.config), "world_size": run.world_size}
            place = {"work_dir": None if run.work_dir is None else str(run.work_dir), "advice": run.work_dir_advice}
            return noted | facts | place | {"run": weakref.ref(run)}
        case ev.AfterLoadCheckpoint():
            return noted | {"kind": "resume", "path": event.path}
        case ev.AfterValEpoch() | ev.AfterTestEpoch():
            kind = "validation" if progress.stage == "val" else "test"
            return noted | {"kind": kind, "metrics": dict(event.metrics)}
        case ev.CheckpointCommitted():
            cost = {"bytes": event.bytes, "stall": event.stall, "seconds": event.seconds}
            return noted | {"kind": "checkpoint", "names": event.names} | cost
        case ev.CheckpointFailed():
            return noted | {"names": event.names, "reason": event.error}
        case ev.CheckpointSkipped():
            return noted | {"names": event.names, "reason": event.reason}
        case ev.OnException():
            state = RunState.INTERRUPTED if isinstance(event.exception, KeyboardInterrupt) else RunState.FAILED
            return noted | {"kind": "end", "state": state, "reason": event.error}
        case ev.AfterRun():
            reason = str(event.run.info.get("stop_reason", ""))
            return noted | {"kind": "end", "state": RunState.STOPPED if reason else RunState.FINISHED, "reason": reason}
    return noted


@register
class RunRecordHook(CopiedAnew, Hook):
    """Write ``run.json`` and ``record.jsonl`` in the work dir, off the training thread.

    - ``run.json`` has the name, the seed and the configuration of the run, and for each session (a resumed run has several)
      its command, machine, versions and git commit, when it began and ended, and how.
    - ``record.jsonl`` has a line for each validation, test, checkpoint and resume, and for the end.

    - With ``costs`` it also has what the run has cost up to then, each 10 s at first, later at each hundredth of the time.
      Of several processes it has the times of all ranks in lines of their own.

    A run that is killed leaves everything up to then. Without a work dir nothing is written.

    Args:
        costs: turn on ``bus.timing``, which takes about 0.3 µs a handler.
    """

    priority = Priority.LOWEST
    observes = True
    ranks = "rank0"
    of_run: ClassVar = {"_folder": NoneType, "_run": NoneType, "_announced": NoneType}

    @check_options
    def __init__(self, *, costs: bool = True) -> None:
        # All of it is used on the lane's thread only.
        self._facts = RunFacts(name="")
        self._folder: Path | None = None
        self._lines = FileWriter(RECORD, None)
        self._began: dict[str, float] = {}
        self._run: weakref.ref[Any] | None = None
        self._costs_at = self._ranks_at = 0.0
        self._straggler: tuple[int, str] | None = None
        self._loaded: dict[str, Any] | None = None
        self._announced: dict[str, Any] | None = None  # the run that has begun, until its first stage
        self._trains = False
        self.timing = costs

    @mount(
        ev.BeforeRun,
        ev.AfterLoadCheckpoint,
        ev.BeforeTrain,
        ev.BeforeVal,
        ev.AfterValEpoch,
        ev.BeforeTest,
        ev.AfterTestEpoch,
        ev.CheckpointCommitted,
        ev.CheckpointFailed,
        ev.CheckpointSkipped,
        ev.CostsMeasured,
        ev.RanksMeasured,
        ev.OnException,
        ev.AfterRun,
        offload="thread",
        capture=_noted,
        on_error="log",
    )
    def write(self, noted: dict[str, Any]) -> None:
        """Write the line of an event."""
        kind = noted["kind"]
        if kind == "before_run":
            self._announce(noted)
        elif self._announced is not None and kind not in ("resume", "costs", "ranks"):  # the run knows whether it resumes
            self._begin(self._announced)
        if kind == "resume":
            self._loaded = noted
        if self._folder is None:
            return
        session = self._facts.sessions[-1]
        if kind == "costs":
            self._measured(noted["costs"], noted["time"], session)
            return
        if kind == "ranks":
            self._compared(noted["ranks"], noted["time"], session)
            return
        self._trains = self._trains or kind == "before_train"
        if not kind.startswith("checkpoint"):  # the request may be of an earlier iteration
            self._advance(session, noted["epoch"], noted["iter"])
        if kind in _STAGES:
            self._began[kind] = noted["time"]
            if kind == "before_train" and self._loaded is not None:  # a test of a checkpoint resumes nothing
                session.resumed_from = self._loaded["path"]
                self._happened(self._folder, self._loaded, session)
            self._loaded = None
            if _STAGES[kind] not in session.stages:
                session.stages.append(_STAGES[kind])
                write_facts(self._folder, self._facts)
        elif kind not in ("before_run", "resume"):
            self._happened(self._folder, noted, session)

    def _advance(self, session: Session, epoch: int, iteration: int) -> None:
        if self._trains or "train" not in session.stages:  # a test after the training may be of an earlier checkpoint
            session.epoch, session.iter = epoch, iteration

    def _announce(self, noted: dict[str, Any]) -> None:
        self._folder = self._loaded = None
        self._trains = False
        self._announced = None if noted["work_dir"] is None else noted
        if self._announced is None:
            log.warning(f"RunRecordHook writes nothing, because the run has no work dir: {noted['advice']}")

    def _begin(self, noted: Mapping[str, Any]) -> None:
        self._announced = None
        folder = Path(noted["work_dir"])
        self._run, self._costs_at = noted["run"], noted["time"] + 10
        self._ranks_at, self._straggler = self._costs_at, None
        session = Session(began=noted["time"], environment=environment(), world_size=noted["world_size"])
        sessions = self._earlier(folder)
        if sessions and sessions[-1].environment.process == session.environment.process:  # a test after the training
            sessions[-1].state, sessions[-1].ended = RunState.RUNNING, None
        else:
            sessions.append(session)
        self._facts = RunFacts(name=noted["name"], seed=noted["seed"], config=noted["config"], sessions=sessions)
        write_facts(folder, self._facts)
        self._lines.open(base.RunFacts(noted["name"], folder, noted["seed"], noted["config"]))
        self._folder = folder  # after a failure, nothing more is written

    def _measured(self, costs: Costs, now: float, session: Session) -> None:
        if now < self._costs_at or session.ended is not None:
            return
        self._costs_at = now + max(10, (now - session.began) / 100)
        self._append_state("costs", costs, now, session)

    def _compared(self, ranks: RankCosts, now: float, session: Session) -> None:
        told = None if ranks.straggler is None else (ranks.straggler.rank, ranks.straggler.name)
        if session.ended is None and (now >= self._ranks_at or told != self._straggler):
            self._ranks_at, self._straggler = now + max(10, (now - session.began) / 100), told
            self._append_state("ranks", ranks, now, session)

    def _append_state(self, kind: str, measured: Costs | RankCosts, now: float, session: Session) -> None:
        if self._run is not None and (run := self._run()) is not None:
            self._advance(session, run.progress.epoch, run.progress.iter)
        where = {"time": now, "kind": kind, "epoch": session.epoch, "iter": session.iter}
        self._lines.append(encode_line(where | msgspec.to_builtins(measured, str_keys=True)))
        self._lines.flush()

    def _earlier(self, folder: Path) -> list[Session]:
        """Return the earlier sessions of a resumed run; keep an unreadable file under another name."""
        try:
            facts = read_facts(folder)
        except RunFolderError as error:
            kept = free_name(folder / f"{FACTS}.old")
            log.warning("the record of earlier sessions cannot be read and is kept", file=str(kept), error=str(error))
            (folder / FACTS).rename(kept)
            return []
        return [] if facts is None else facts.sessions

    def _happened(self, folder: Path, noted: dict[str, Any], session: Session) -> None:
        if "metrics" in noted:
            noted["metrics"] = _numbers(noted["metrics"])
        match noted["kind"]:
            case "validation":
                noted["seconds"] = noted["time"] - self._began.get("before_val", noted["time"])
            case "test":
                noted["seconds"] = noted["time"] - self._began.get("before_test", noted["time"])
            case "end":
                if self._run is not None and (run := self._run()) is not None and (costs := run.costs()) is not None:
                    self._costs_at = 0.0
                    self._measured(costs, noted["time"], session)
                session.state, session.reason, session.ended = noted["state"], noted["reason"], noted["time"]
        self._lines.append(encode_line(noted))
        self._lines.flush()
        if noted["kind"] in ("resume", "end"):
            write_facts(folder, self._facts)
        if session.ended is not None:
            self._lines.close()  # the last checkpoint may still be written, and opens it again


_STAGES = {"before_train": "train", "before_val": "val", "before_test": "test"}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics; a tensor with one element is one."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str) and _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or getattr(value, "numel", lambda: getattr(value, "size", 0))() == 1
