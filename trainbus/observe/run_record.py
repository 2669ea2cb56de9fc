"""``RunRecordHook``: write the files that ``trainbus report`` and ``trainbus runs`` read."""

from __future__ import annotations

import time
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

from trainbus.eventloop import Hook, Priority, check_options, get_logger, mount
from trainbus.eventloop import events as ev
from trainbus.eventloop.checkpoint import keep_as_old
from trainbus.eventloop.registry import register
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.writers.base import RunFacts
from trainbus.hooks.writers.files import FileWriter, claim
from trainbus.observe.entries import entry_of
from trainbus.observe.environment import environment
from trainbus.observe.record import Begin, Compared, End, Entry, Measured, Resume, Stage, fields_of
from trainbus.observe.run_folder import MANIFEST, RECORD, RunFolderError, encode_line, read_manifest, write_manifest
from trainbus.observe.settings import data_settings, settings_of
from trainbus.observe.story import RunSession, RunStory

log = get_logger()


def _entry_of(event: Any) -> Entry:
    """Return what an event says, at the beginning of a training with the settings of the run."""
    if isinstance(event, ev.BeforeTrainEpoch):
        at = event.progress
        return Stage(time=time.time(), epoch=at.epoch, iter=at.iter, name="train", settings=data_settings(event.run))
    entry = entry_of(event)
    if isinstance(entry, Stage) and (entry.name == "train" or not event.run.training):
        entry.settings = settings_of(event.run, event.progress)
    return entry


@register
class RunRecordHook(CopiedAnew, Hook):
    """Write ``run.json`` and ``record.jsonl`` in the work dir, off the training thread.

    - ``run.json`` has the name, the seed and the configuration of the run, and for each session (a resumed run has several)
      its command, machine, versions and git commit, when it began and ended, and how, and its settings: learning rate, batch
      size, optimizer, schedule, the model's size, options of all hooks. No passwords, tokens and keys.
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
    of_run: ClassVar = {"_story": RunStory, "_folder": NoneType, "_announced": NoneType}

    @check_options
    def __init__(self, *, costs: bool = True) -> None:
        # All of it is used on the lane's thread only.
        self._story = RunStory()
        self._folder: Path | None = None
        self._lines = FileWriter(RECORD, None)
        self._due: dict[type[Entry], float] = {}
        self._straggler: tuple[int, str] | None = None
        self._announced: Begin | None = None  # the run that has begun, until its first stage
        self.timing = costs

    @mount(
        ev.BeforeRun,
        ev.AfterLoadCheckpoint,
        ev.BeforeTrain,
        ev.BeforeTrainEpoch,
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
        capture=_entry_of,
        on_error="log",
    )
    def write(self, entry: Entry) -> None:
        """Write what has happened."""
        if isinstance(entry, Begin):
            self._announce(entry)
        elif self._announced is not None and not isinstance(entry, Resume | Measured | Compared):
            self._begin(self._announced)  # the run knows now whether it resumes
        if isinstance(entry, Measured | Compared) and not self._is_due(entry):
            return
        lines = self._story.add(entry)
        if self._folder is None:
            return
        session = self._story.sessions[-1]
        if isinstance(entry, End) and (run := self._story.run()) is not None and run.bus.timing:
            lines.insert(0, Measured(time=entry.time, epoch=session.epoch, iter=session.iter, costs=run.bus.costs()))
        for line in lines:
            self._lines.append(encode_line(fields_of(line)))
        if lines:
            self._lines.flush()
        if session.ended is not None:
            self._lines.close()  # the last checkpoint may still be written, and opens it again
        if self._story.changed:
            self._story.changed = False
            write_manifest(self._folder, self._story.manifest)

    @mount("before_run")
    def claim_files(self, event: ev.BeforeRun) -> None:
        """Raise ConfigurationError if another hook writes the same files."""
        if event.run.work_dir is not None:
            claim(event.run, self.label, (MANIFEST, RECORD))

    def _announce(self, begin: Begin) -> None:
        self._folder = None
        self._announced = None if begin.work_dir is None else begin
        if self._announced is None:
            log.warning(
                f"RunRecordHook writes nothing, because the run has no work dir: {begin.advice}", id="record-without-work-dir"
            )

    def _begin(self, begin: Begin) -> None:
        self._announced = None
        folder = Path(begin.work_dir or "")
        self._due = {Measured: begin.time + 10, Compared: begin.time + 10}
        self._straggler = None
        session = RunSession(began=begin.time, environment=environment(), world_size=begin.world_size)
        self._story.open(session, self._earlier(folder))
        write_manifest(folder, self._story.manifest)
        self._lines.open(RunFacts(begin.name, folder, begin.seed, begin.config))
        self._folder = folder  # after a failure, nothing more is written

    def _is_due(self, entry: Measured | Compared) -> bool:
        """Return True once in a while, and for ranks also if another one holds up the others."""
        if self._folder is None or (session := self._story.sessions[-1]).ended is not None:
            return False
        slow = entry.ranks.straggler if isinstance(entry, Compared) else None
        straggler = self._straggler if isinstance(entry, Measured) else None if slow is None else (slow.rank, slow.name)
        if entry.time < self._due[type(entry)] and straggler == self._straggler:
            return False
        self._due[type(entry)] = entry.time + max(10, (entry.time - session.began) / 100)
        self._straggler = straggler
        return True

    def _earlier(self, folder: Path) -> list[RunSession]:
        """Return the earlier sessions of a resumed run; keep an unreadable file under another name."""
        try:
            manifest = read_manifest(folder)
        except RunFolderError as error:
            kept = keep_as_old(folder / MANIFEST)
            log.warning(
                "the record of earlier sessions cannot be read and is kept",
                id="record-set-aside",
                file=str(kept),
                error=str(error),
            )
            return []
        return [] if manifest is None else manifest.sessions
