"""TensorBoard: torch's SummaryWriter, called by the training loop as its docs show."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from benchmarks.peers import Logged, Statement


@contextmanager
def logs(work_dir: Path, scalars: Mapping[str, object]) -> Iterator[Logged]:
    with SummaryWriter(str(work_dir)) as writer:
        code = "for name, value in scalars.items():\n    writer.add_scalar(name, value, 7)"
        yield Logged(Statement(code, {"writer": writer, "scalars": scalars}), writer.flush)


LOGS = {"TensorBoard SummaryWriter": logs}
