"""Write scalars, images, histograms and texts for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from trainbus.eventloop import check_options
from trainbus.eventloop.registry import register
from trainbus.hooks.options import Name, PositiveInt
from trainbus.hooks.writers.base import Image, RunFacts, Where, Writer, load
from trainbus.hooks.writers.histogram import BinCounts

_QUEUE = 10_000  # events in the queue of TensorBoard's writing thread; more than a batch of the logger
_NEVER = 10**6  # seconds; the logger calls flush


@register
class TensorBoardWriter(Writer):
    """Write event files to a folder in the work dir, for ``tensorboard --logdir``; needs the extra ``tensorboard``.

    - The scalars of one step are one record: six of them cost as much as one ``SummaryWriter.add_scalar``.
    - A resumed run adds a file to the folder, and TensorBoard shows one run. Repeated iterations appear once, because
      TensorBoard hides the earlier steps from the first new one on (``purge_step`` of ``SummaryWriter``).
    - The configuration and the experiment's name appear under *Text*.
    - Without a work dir nothing is written.

    Args:
        directory: name of the folder in the work dir.
        interval: iterations between training scalars; None uses the logger's.

    Raises:
        ConfigurationError: tensorboard is not installed, or an option is invalid.
    """

    needs_work_dir = True

    of_run: ClassVar = {"_events": None}

    @check_options
    def __init__(self, directory: Name = "tensorboard", *, interval: PositiveInt | None = None) -> None:
        super().__init__(interval)
        self.directory = directory
        self._torch, self._event, self._summary = load(
            "TensorBoardWriter",
            "tensorboard",
            "torch.utils.tensorboard",
            "tensorboard.compat.proto.event_pb2",
            "tensorboard.compat.proto.summary_pb2",
        )

    def files(self) -> Collection[str]:
        return (self.directory,)

    def open(self, run: RunFacts) -> None:
        self._events = self._torch.SummaryWriter(str(run.folder / self.directory), max_queue=_QUEUE, flush_secs=_NEVER)
        self._trains = False

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        self._begin_training(step, where)
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._events.file_writer.add_summary(self._summary.Summary(value=values), step)

    def write_reported(self, name: str, value: Image | BinCounts | str, step: int, where: Where) -> None:
        self._begin_training(step, where)
        if isinstance(value, str):
            self._events.add_text(name, value, step)
        else:
            super().write_reported(name, value, step, where)

    def _begin_training(self, step: int, where: Where) -> None:
        """Write what ``purge_step`` of ``SummaryWriter`` writes; the step is known only with the first data of the training."""
        if where.stage == "train" and not self._trains:
            self._trains = True
            log = self._event.SessionLog(status=self._event.SessionLog.START)
            self._events.file_writer.add_event(self._event.Event(session_log=log), step)

    def write_config(self, config: Mapping[str, Any]) -> None:
        if config:
            text = json.dumps(config, indent=2, ensure_ascii=False)
            self._events.add_text("config", f"```json\n{text}\n```")

    def write_text(self, name: str, text: str, where: Where) -> None:
        self._events.add_text(name, text, where.iter)

    def write_image(self, name: str, image: Image, step: int) -> None:
        self._events.add_image(name, image, step, dataformats="HWC")

    def write_histogram(self, name: str, histogram: BinCounts, step: int) -> None:
        self._events.add_histogram_raw(
            name,
            histogram.least,
            histogram.greatest,
            histogram.total,
            histogram.sum,
            histogram.sum_of_squares,
            histogram.edges[1:].tolist(),
            histogram.counts,
            step,
        )

    def flush(self) -> None:
        """Wait until TensorBoard's thread has written everything."""
        self._events.flush()

    def close(self) -> None:
        self._events.close()
