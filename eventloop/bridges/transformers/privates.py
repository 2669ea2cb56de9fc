"""The undocumented names of Transformers that this bridge uses."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from eventloop.privates import Names, check_names

TRAINING_LOOP: Final = "_inner_training_loop"
FINALIZE: Final = "_finalize_training"
LOAD_BEST: Final = "_load_best_model"
SAVE: Final = "_save_checkpoint"
OUTPUT_DIR: Final = "_get_output_dir"
LOG_SAVE_EVALUATE: Final = "_maybe_log_save_evaluate"

NAMES: Final[Names] = {
    "trainer.callback_handler": ("host.py: the moments of a training", "5.24.0"),
    f"trainer.{TRAINING_LOOP}": ("host.py: a run begins and ends", "5.24.0"),
    f"trainer.{FINALIZE}": ("host.py: wait for folders", "5.24.0"),
    f"trainer.{LOAD_BEST}": ("host.py: a training ends before it", "5.24.0"),
    f"trainer.{SAVE}": ("host.py, folders.py: write a folder", "5.24.0"),
    f"trainer.{OUTPUT_DIR}": ("folders.py: give a folder another name", "5.24.0"),
    f"trainer.{LOG_SAVE_EVALUATE}": ("iterations.py: save and stop after it", "5.24.0"),
    "transformers.trainer_utils.rotate_checkpoints": ("saver.py: remove older folders", "5.24.0"),
}


def check(trainer: Any) -> None:
    """Raise ConfigurationError if the installed version lacks a name."""
    check_names("transformers", "transformers", NAMES, trainer=trainer, transformers=import_module("transformers"))


def output_dir(trainer: Any, trial: Any) -> str:
    """Return the directory of the trainer's checkpoints."""
    directory: str = trainer._get_output_dir(trial)
    return directory


def save(trainer: Any) -> None:
    """Make the trainer save a checkpoint."""
    trainer._save_checkpoint(trainer.model_wrapped, None)


def rotate(**options: Any) -> None:
    """Remove older folders by the trainer's rule."""
    import_module("transformers.trainer_utils").rotate_checkpoints(**options)
