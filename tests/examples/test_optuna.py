"""The example of a search with Optuna: ``examples/optuna_digits.py``."""

from pathlib import Path

import pytest
import torch

from trainbus.eventloop.checkpoint import load
from trainbus.observe import RunFolder

from ..scripts import run_script

optuna = pytest.importorskip("optuna")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "optuna_digits.py"
TRIALS = [{"lr": 1e-2, "width": 16}, {"lr": 2e-2, "width": 16}, {"lr": 1e-2, "width": 32}, {"lr": 1e-4, "width": 8}]
ENDED = 2  # the number of the trial

SEARCH = """
import os, runpy, signal, sys
from pathlib import Path
from trainbus import Hook

class Kill(Hook):
    priority = "LOWEST"

    def end(self, event):
        if event.run.work_dir.name == "trial-2" and not Path("ended").exists():
            Path("ended").touch()
            self.kill()

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

class InAnEpoch(Kill):
    def after_train_iter(self, event):
        if event.progress.iter + 1 == 100:
            self.end(event)

class CtrlC(InAnEpoch):
    def kill(self):
        raise KeyboardInterrupt

class BehindAReport(Kill):
    def after_val_epoch(self, event):
        if event.progress.epoch == 3:
            self.end(event)

class BehindTheRun(Kill):
    def after_run(self, event):
        self.end(event)

example = runpy.run_path(sys.argv[1])
example["search"](Path.cwd(), trials=4, interval=1, hooks=[globals()[sys.argv[2]]()])
"""


@pytest.mark.long
@pytest.mark.parametrize(("moment", "epoch"), [("InAnEpoch", 2), ("CtrlC", 2), ("BehindAReport", 3), ("BehindTheRun", 6)])
def test_a_search_that_was_killed_goes_on_with_the_trial_that_it_was_in(example, tmp_path, moment, epoch):
    storage = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=storage, study_name="digits", direction="maximize")
    for parameters in TRIALS:
        study.enqueue_trial(parameters)
    run = [run_script(SEARCH, tmp_path, name=name, arguments=[EXAMPLE, moment], cwd=tmp_path) for name in ("first", "again")]
    assert [one.returncode for one in run] == [1 if moment == "CtrlC" else -9, 0], run[1].stderr
    assert "already reported" not in run[1].stderr

    *first, again = study.trials
    assert [trial.state.name for trial in first] == ["COMPLETE", "COMPLETE", "FAIL", "PRUNED"]
    assert (again.state.name, again.params, again.user_attrs) == ("COMPLETE", TRIALS[ENDED], {"folder": "trial-2"})
    assert [*again.intermediate_values] == [1, 2, 3, 4, 5, 6]
    assert again.value == again.intermediate_values[6]
    session = RunFolder(tmp_path / "trial-2").story().sessions[-1]
    assert (Path(session.resumed_from).name, str(session.state)) == (f"epoch_{epoch}.safetensors", "finished")

    example("optuna_digits").train(optuna.trial.FixedTrial(TRIALS[ENDED]), tmp_path / "alone", [])
    ours, alone = (load(tmp_path / name / "epoch_6.safetensors") for name in ("trial-2", "alone"))
    assert all(torch.equal(ours["state_dict"][key], alone["state_dict"][key]) for key in alone["state_dict"])
    assert str(ours["optimizer"]) == str(alone["optimizer"])
