"""``WriterChecks``: what every writer that keeps its data promises."""

import math
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, TrainLoop
from trainbus.eventloop.platform import IN_USE_STAYS
from trainbus.hooks import LoggerHook, Writer
from trainbus.hooks.writers import RunFacts, Where

Values = list[tuple[int, float]]


class WriterChecks:
    """What every writer that keeps its data promises, as tests for pytest.

    Derive a class whose name begins with ``Test``. Make your writer, and read what it has kept with the tool that reads it.

        class TestTable(WriterChecks):
            def make(self):
                return Table()

            def read(self, work_dir, name):
                return [(row["step"], row["value"]) for row in rows(work_dir) if row["name"] == name]
    """

    digits: ClassVar[float] = 0.0
    """The relative error of a value that was kept: 1e-7 if it is of 32 bits."""
    largest: ClassVar[float] = 1e20
    """A large whole number that must be kept."""
    infinity: ClassVar[float] = math.inf
    """What is kept for infinity."""
    validation_steps: ClassVar[tuple[int, int]] = (1, 2)
    """The steps of validations after epochs of three iterations: the epochs, or the iterations."""
    restores_folder: ClassVar[bool] = True
    """Whether a writer whose files were removed goes on in new ones."""

    def make(self) -> Writer:
        """Return a new writer, with the interval of the logger."""
        raise NotImplementedError

    def read(self, work_dir: Path, name: str) -> Values:
        """Return the values of a name that are kept for a work dir, with their steps."""
        raise NotImplementedError

    def loop(self, **options: Any) -> TrainLoop:
        """Return a training of two epochs of three iterations. The loss is 1 in the first iteration, 2 in the second.

        The accuracy of the first validation is 0.75, that of the second 1.
        """
        bus = Bus(LoggerHook(interval=1, writers=[self.make()]))
        bus.on("after_train_iter", lambda event: event.run.report(loss=event.progress.iter + 1.0))
        bus.on("after_val_iter", lambda event: event.run.report(accuracy=0.5 + event.progress.epoch / 4))
        return TrainLoop(
            model := torch.nn.Linear(1, 1),
            torch.optim.SGD(model.parameters(), lr=0.1),
            step=lambda model, batch: model(batch).mean(),
            train_data=[torch.ones(1, 1)] * 3,
            val_data=[torch.ones(1, 1)],
            val_step=lambda model, batch: {},
            max_epochs=2,
            bus=bus,
            **options,
        )

    def write(self, work_dir: Path, *lines: tuple[int, dict[str, float]]) -> None:
        """Open a writer for a run, write scalars at each step, and close it."""
        writer = self.make()
        writer.open(RunFacts("checks", work_dir))
        for step, values in lines:
            writer.write_scalars(values, step, Where("train", epoch=1, iter=step))
        writer.flush()
        writer.close()

    def test_its_own_tool_reads_the_scalars_of_a_run(self, tmp_path: Path) -> None:
        self.loop(work_dir=tmp_path).run()
        assert self.read(tmp_path, "train/loss") == [(step, float(step)) for step in range(1, 7)]
        assert self.read(tmp_path, "val/accuracy") == [*zip(self.validation_steps, (0.75, 1.0), strict=True)]

    def test_nan_infinities_and_all_digits_are_kept(self, tmp_path: Path) -> None:
        values = [math.nan, math.inf, -math.inf, 1 / 3, int(self.largest), True]
        self.write(tmp_path, *((step, {"train/loss": value}) for step, value in enumerate(values, 1)))
        found = [float(value) for _, value in self.read(tmp_path, "train/loss")]
        assert math.isnan(found[0])
        expected = [self.infinity, -self.infinity, *map(float, values[3:])]
        assert found[1:] == pytest.approx(expected, rel=self.digits, abs=0.0)

    def test_a_resumed_run_continues_what_was_kept(self, tmp_path: Path) -> None:
        for step in (1, 2):
            self.write(tmp_path, (step, {"train/loss": step / 2, f"train/new{step}": 1.0}))
        assert self.read(tmp_path, "train/loss") == [(1, 0.5), (2, 1.0)]
        assert self.read(tmp_path, "train/new2") == [(2, 1.0)]

    def test_a_folder_that_is_emptied_gets_later_data(self, tmp_path: Path) -> None:
        if not self.restores_folder:
            pytest.skip("its data is not in files")
        if IN_USE_STAYS:
            pytest.skip("files in use cannot be removed here")

        def remove(event: Any) -> None:
            if event.progress.iter == 3:
                loop.bus.drain()
                for path in tmp_path.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

        loop = self.loop(work_dir=tmp_path)
        loop.bus.on("after_train_iter", remove)
        with capture_logs() as logs:
            loop.run()
        assert sorted(set(self.read(tmp_path, "train/loss")))[-3:] == [(step, float(step)) for step in (4, 5, 6)]
        told = {line["event"] for line in logs if line["log_level"] != "debug"}
        assert told == {"a writer failed and will be tried again", "a writer works again"}

    def test_without_a_work_dir_nothing_is_written_which_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if not self.make().needs_work_dir:
            pytest.skip("it needs no work dir")
        monkeypatch.chdir(tmp_path)
        before = sorted(tmp_path.iterdir())
        with capture_logs() as logs:
            self.loop(config={"lr": 0.1}).run()
        assert sorted(tmp_path.iterdir()) == before
        (told,) = [line for line in logs if "write nothing" in line["event"]]
        assert told["writers"] == type(self.make()).__name__
