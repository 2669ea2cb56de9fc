"""Write scalars, images, histograms and texts for Weights & Biases, offline."""

from __future__ import annotations

import errno
import html
import secrets
import time
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from eventloop import check_options, register
from hooks.options import Name, PositiveInt
from hooks.writers.base import Image, RunFacts, Where, Writer, load
from hooks.writers.files import run_id
from hooks.writers.histogram import BinCounts

_ID = "wandb/run_id"  # file with the id of the run


@register
class WandbWriter(Writer):
    """Write an offline Weights & Biases run to ``<work_dir>/wandb``; needs the extra ``wandb``.

    - Nothing goes over the network; ``wandb sync <work_dir>/wandb/offline-run-...`` uploads the run.
    - A resumed run makes a new folder with the id of the first one (from ``wandb/run_id``) and continues its steps. Upload it
      with ``wandb sync --append``.
    - W&B's step counts iterations; charts use ``train/step``, ``val/step`` and so on.
    - Without a work dir nothing is written.

    Args:
        project: project for the upload; None leaves it to ``wandb sync``.
        interval: iterations between training scalars; None uses the logger's.

    Raises:
        ConfigurationError: wandb is not installed, or an option is invalid.
    """

    needs_work_dir = True

    of_run: ClassVar = {"_run": None}

    @check_options
    def __init__(self, project: Name | None = None, *, interval: PositiveInt | None = None) -> None:
        super().__init__(interval)
        # W&B needs PIL for images.
        self._wandb: Any = load("WandbWriter", "wandb", "wandb", "PIL")[0]
        self.project = project

    def files(self) -> Collection[str]:
        return (_ID,)

    def open(self, run: RunFacts) -> None:
        """Begin a W&B run; the user's global W&B run stays untouched."""
        run.folder.mkdir(parents=True, exist_ok=True)
        self._iter, self._failed = 0, False
        stored_id = run_id(run.work_dir, _ID, lambda: secrets.token_hex(4))
        # W&B names a folder by second and id, and would overwrite the folder of a training that ended in the same second.
        while (run.folder / "wandb" / f"offline-run-{datetime.now().astimezone():%Y%m%d_%H%M%S}-{stored_id}").exists():
            time.sleep(0.05)
        self._run = self._wandb.init(
            mode="offline",
            dir=str(run.work_dir),
            project=self.project,
            name=run.name,
            id=stored_id,
            reinit="create_new",
            # A logger does not record the terminal, the code and the machine.
            settings=self._wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False),
        )
        for stage in ("train", "val", "test", "eval"):
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write_scalars(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        self._iter = max(self._iter, where.iter)
        self._run.log({**scalars, f"{where.stage}/step": step, "epoch": where.epoch}, step=self._iter)

    def write_reported(self, name: str, value: Image | BinCounts | str, step: int, where: Where) -> None:
        if isinstance(value, str):
            self._log(name, self._wandb.Html(f"<pre>{html.escape(value)}</pre>", inject=False), step)
        else:
            super().write_reported(name, value, step, where)

    def write_image(self, name: str, image: Image, step: int) -> None:
        self._log(name, self._wandb.Image(image[..., 0] if image.shape[-1] == 1 else image), step)

    def write_histogram(self, name: str, histogram: BinCounts, step: int) -> None:
        self._log(name, self._wandb.Histogram(np_histogram=(histogram.counts, histogram.edges.tolist())), step)

    def _log(self, name: str, value: Any, step: int) -> None:
        stage = name.partition("/")[0]
        if stage == "train":
            self._iter = max(self._iter, step)
        self._run.log({name: value, f"{stage}/step": step}, step=self._iter)

    def write_config(self, config: Mapping[str, Any]) -> None:
        if config:
            self._run.config.update(dict(config), allow_val_change=True)

    def flush(self) -> None:
        """Check that W&B's folder exists, because W&B's process does not report lost data.

        Raises:
            FileNotFoundError: the folder was removed.
        """
        if not Path(self._run.dir).is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder was removed while the run wrote to it", self._run.dir)

    def aborted(self) -> None:
        self._failed = True

    def close(self) -> None:
        self._run.finish(exit_code=int(self._failed))
