"""Search hyperparameters for scikit-learn's digits with Optuna, which prunes trials that are behind.

python examples/optuna_digits.py        # then in further terminals, too; pip install "optuna>=4.9" "trainbus[demo]"

Kill the script and start it again: the trial that it was in goes on from its last checkpoint, bit for bit.
"""

import sys
import time
import warnings
from pathlib import Path

import optuna
import torch
from optuna.trial import TrialState
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from trainbus import Bus, CheckpointHook, Hook, LoggerHook, RunRecordHook, TrainLoop

warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of Optuna's heartbeats
EPOCHS = 6
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


class Report(Hook):
    """Report each validation to Optuna, and stop when it says so."""

    def __init__(self, trial):
        self.trial = trial
        self.told = dict(trial.study.trials[trial.number].intermediate_values)  # before the trial was killed

    def after_val_epoch(self, event):
        epoch = event.progress.epoch
        if epoch not in self.told:  # a validation that was killed is made again
            self.told[epoch] = event.metrics["accuracy"]
            self.trial.report(self.told[epoch], epoch)
        if self.trial.should_prune():
            event.run.stop("pruned")


def step(model, batch):
    images, labels = batch
    logits = model(images)
    return {"loss": cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


def train(trial, folder, hooks):
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_data = DataLoader(data, batch_size=32, sampler=SubsetRandomSampler(range(1400)))
    val_data = DataLoader(Subset(data, range(1400, len(data))), batch_size=256)
    width = trial.suggest_int("width", 8, 64, log=True)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    loop = TrainLoop(
        model,
        optimizer,
        step=step,
        train_data=train_data,
        val_data=val_data,
        bus=Bus(CheckpointHook(interval=1, max_keep_ckpts=1), LoggerHook(interval=20), RunRecordHook(), *hooks),
        max_epochs=EPOCHS,
        work_dir=folder,
        seed=0,
        config=trial.params,
    )
    loop.run(resume="auto")


def search(folder, trials=8, interval=10, hooks=()):
    """Search until the study has its trials, together with other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    retry = optuna.storages.RetryHeartbeatStaleTrialCallback(inherit_intermediate_values=True)
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{folder}/study.db",
        heartbeat_interval=interval,  # seconds
        grace_period=3 * interval,  # a process that is silent for so long was killed
        heartbeat_stale_trial_callback=retry,
    )
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(storage=storage, study_name="digits", direction="maximize", pruner=pruner, load_if_exists=True)

    def objective(trial):
        name = trial.user_attrs.get("folder", f"trial-{trial.number}")  # that of the trial that was killed
        trial.set_user_attr("folder", name)
        report = Report(trial)
        try:
            if not trial.should_prune():
                train(trial, folder / name, [report, *hooks])
        except KeyboardInterrupt:
            retry(study, study.trials[trial.number])  # for Optuna, it has failed
            raise
        if trial.should_prune():
            raise optuna.TrialPruned
        return report.told[EPOCHS]

    while True:
        optuna.storages.fail_stale_trials(study)  # those of killed processes wait to be done again
        states = [trial.state for trial in study.get_trials(deepcopy=False)]
        under_way = states.count(TrialState.RUNNING)
        if TrialState.WAITING in states or sum(state in ENDED for state in states) + under_way < trials:
            study.optimize(objective, n_trials=1)
        elif under_way:
            time.sleep(1)  # for other processes, which may be killed
        else:
            return study


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/optuna")
    found = search(folder)
    print(f"best: {found.best_value:.1%}, {found.best_params}, {folder / found.best_trial.user_attrs['folder']}")
