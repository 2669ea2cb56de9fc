"""Write scalars and images for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eventloop import check_options, register
from hooks.options import Name, PositiveInt
from hooks.writers.base import Image, RunFacts, Where, Writer, load

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
        ConfigurationError: tensorboard is not installed, the interval is not positive, or the directory name is empty.
    """

    @check_options
    def __init__(self, directory: Name = "tensorboard", *, interval: PositiveInt | None = None) -> None:
        super().__init__(interval)
        self.directory = directory
        load("TensorBoardWriter", "tensorboard", "torch.utils.tensorboard", "tensorboard.compat.proto.summary_pb2")
        self._events: Any = None  # a SummaryWriter
        self._trains = False

    def open(self, run: RunFacts) -> None:
        if run.work_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            path = str(run.work_dir / self.directory)
            self._events = SummaryWriter(path, max_queue=_QUEUE, flush_secs=_NEVER)
            self._trains = False

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        if self._events is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if where.stage == "train" and not self._trains:
            self._trains = True
            # SummaryWriter's purge_step, which is known only with the first scalars.
            self._events.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._events.file_writer.add_summary(Summary(value=values), step)

    def write_config(self, config: Mapping[str, Any]) -> None:
        if self._events is not None and config:
            text = json.dumps(config, indent=2, ensure_ascii=False)
            self._events.add_text("config", f"```json\n{text}\n```")

    def write_text(self, name: str, text: str, where: Where) -> None:
        if self._events is not None:
            self._events.add_text(name, text, where.iter)

    def write_image(self, name: str, image: Image, step: int) -> None:
        if self._events is not None:
            self._events.add_image(name, image, step, dataformats="HWC")

    def flush(self) -> None:
        """Wait until TensorBoard's thread has written everything."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()
