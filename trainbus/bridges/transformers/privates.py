"""The undocumented names of Transformers that this bridge uses."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

from trainbus.eventloop.privates import Names, check_names

TRAINING_LOOP: Final = "_inner_training_loop"
LOAD_BEST: Final = "_load_best_model"
SAVE: Final = "_save_checkpoint"
OUTPUT_DIR: Final = "_get_output_dir"
LOG_SAVE_EVALUATE: Final = "_maybe_log_save_evaluate"

_SEEN: Final = "4.57.0 to 5.24.0"
NAMES: Final[Names] = {
    "trainer.callback_handler": ("host.py: the moments of a training", _SEEN),
    f"trainer.{TRAINING_LOOP}": ("host.py: a run begins and ends", _SEEN),
    f"trainer.{LOAD_BEST}": ("host.py: a training ends before it", _SEEN),
    f"trainer.{SAVE}": ("host.py, folders.py: write a folder", _SEEN),
    f"trainer.{OUTPUT_DIR}": ("folders.py: give a folder another name", _SEEN),
    f"trainer.{LOG_SAVE_EVALUATE}": ("iterations.py: save and stop after it", _SEEN),
    "transformers.trainer_utils.rotate_checkpoints|trainer._rotate_checkpoints": ("saver.py: remove older folders", _SEEN),
}


def check(trainer: Any) -> None:
    """Raise ConfigurationError if the installed version lacks a name."""
    check_names("transformers", "transformers", NAMES, trainer=trainer, transformers=import_module("transformers"))


def save(trainer: Any) -> None:
    """Make the trainer save a checkpoint."""
    trainer._save_checkpoint(trainer.model_wrapped, None)


def rotate(trainer: Any, directory: Path) -> None:
    """Remove older folders by the trainer's rule."""
    if hasattr(trainer, "_rotate_checkpoints"):  # before 5.3
        trainer._rotate_checkpoints(use_mtime=True, output_dir=str(directory))
        return
    limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
    import_module("transformers.trainer_utils").rotate_checkpoints(
        output_dir=str(directory), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True
    )
