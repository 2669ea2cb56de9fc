"""Write scalars, images, histograms and texts for Weights & Biases, offline or online."""

from __future__ import annotations

import errno
import html
import inspect
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from trainbus.eventloop import ConfigurationError, check_options
from trainbus.eventloop.registry import register
from trainbus.hooks.options import Name, PositiveInt, one_or_more
from trainbus.hooks.writers.base import Image, RunFacts, Where, Writer, load
from trainbus.hooks.writers.files import run_id
from trainbus.hooks.writers.histogram import BinCounts

_ID = "wandb/run_id"  # file with the id of the run
_BY_ID = "a resumed training continues the W&B run in wandb/run_id, or that of id="
_OWN: Final = {
    "config": "give the run config=, which is written",
    "dir": "it is the work dir of the run",
    "fork_from": _BY_ID,
    "reinit": "your own W&B run stays as it is",
    "resume": _BY_ID,
    "resume_from": _BY_ID,
    "settings": "set the variables WANDB_... of the environment",
}
"""Options of ``wandb.init`` that the writer sets itself, and why."""


@register
class WandbWriter(Writer):
    """Write a Weights & Biases run to ``<work_dir>/wandb``, offline by default; needs the extra ``wandb``.

    - Offline, nothing goes over the network; ``wandb sync <work_dir>/wandb/offline-run-...`` uploads the run.
    - Online, W&B uploads during the run. It needs an API key, by ``wandb login`` or in ``WANDB_API_KEY``.
    - A resumed run continues the W&B run whose id is in ``wandb/run_id``. Offline it makes a new folder: upload it with
      ``wandb sync --append``. Of repeated iterations, W&B keeps what it got first.
    - W&B's step counts iterations; charts use ``train/step``, ``val/step`` and so on.
    - Without a work dir nothing is written.

    Args:
        project: project of the run; None is W&B's default.
        mode: ``"offline"`` or ``"online"``.
        entity: user or team that owns the run; None is the default of the account.
        group: name of a group of runs, such as those of one experiment with several seeds.
        tags: tags of the run, for W&B's filters.
        name: name of the run in W&B; by default that of the run here.
        id: id of a W&B run to continue; by default the one in ``wandb/run_id``, or a new one.
        interval: iterations between training scalars; None uses the logger's.
        **options: further options of ``wandb.init``, such as ``notes`` and ``job_type``.

    Raises:
        ConfigurationError: wandb is not installed, an option is invalid, or ``mode="online"`` finds no API key.
    """

    needs_work_dir = True

    of_run: ClassVar = {"_run": None}

    @check_options
    def __init__(
        self,
        project: Name | None = None,
        *,
        mode: Literal["offline", "online"] = "offline",
        entity: Name | None = None,
        group: Name | None = None,
        tags: str | Sequence[str] = (),
        name: Name | None = None,
        id: Name | None = None,  # noqa: A002 - as in wandb.init
        interval: PositiveInt | None = None,
        **options: Any,
    ) -> None:
        super().__init__(interval)
        # W&B needs PIL for images.
        self._wandb: Any = load("WandbWriter", "wandb", "wandb", "PIL")[0]
        self.project = project
        self.mode = mode
        self.entity, self.group, self.name, self.id = entity, group, name, id
        self.options = self._checked(options)
        self.tags = one_or_more("tags", tags, "a tag or a list of tags") if tags else ()
        if mode == "online" and not self._wandb.api.api_key:  # else W&B would ask for it, on the logger's thread
            raise ConfigurationError(
                'WandbWriter(mode="online") found no API key: run `wandb login`, or set the environment variable WANDB_API_KEY'
            )

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        taken = inspect.signature(self._wandb.init).parameters
        for option, value in options.items():
            if option in _OWN:
                raise ConfigurationError(f"WandbWriter sets {option}= of wandb.init itself: {_OWN[option]}")
            if option not in taken:
                raise ConfigurationError.unknown_option("WandbWriter", option, [one for one in taken if one not in _OWN], value)
        return options

    def in_check(self) -> Writer:
        self.mode = "offline"
        return self

    def files(self) -> Collection[str]:
        return (_ID,)

    def open(self, run: RunFacts) -> None:
        """Begin a W&B run; the user's global W&B run stays untouched."""
        run.folder.mkdir(parents=True, exist_ok=True)
        self._iter, self._failed = 0, False
        given = self.id
        stored_id = run_id(run.work_dir, _ID, lambda: given or secrets.token_hex(4), lambda known: given in (None, known))
        kind = "run" if self.mode == "online" else "offline-run"
        # W&B names a folder by second and id, and would overwrite the folder of a training that ended in the same second.
        while (run.folder / "wandb" / f"{kind}-{datetime.now().astimezone():%Y%m%d_%H%M%S}-{stored_id}").exists():
            time.sleep(0.05)
        self._run = self._wandb.init(
            mode=self.mode,
            dir=str(run.work_dir),
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=self.tags or None,
            name=self.name or run.name,
            id=stored_id,
            resume="allow" if self.mode == "online" else None,
            reinit="create_new",
            **self.options,
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
        self._iter = max(self._iter, where.iter)  # else a resumed run that begins with a validation would log to step 0
        if isinstance(value, str):
            self._log(name, self._wandb.Html(f"<pre>{html.escape(value)}</pre>", inject=False), step)
        else:
            super().write_reported(name, value, step, where)

    def write_image(self, name: str, image: Image, step: int) -> None:
        self._log(name, self._wandb.Image(image[..., 0] if image.shape[-1] == 1 else image), step)

    def write_histogram(self, name: str, histogram: BinCounts, step: int) -> None:
        self._log(name, self._wandb.Histogram(np_histogram=(histogram.counts, histogram.edges.tolist())), step)

    def _log(self, name: str, value: Any, step: int) -> None:
        self._run.log({name: value, f"{name.partition('/')[0]}/step": step}, step=self._iter)

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
