"""Where scalars go. A writer of your own derives from :class:`Writer`; it is called from the logger's thread only."""

from hooks.writers.base import Image, RunFacts, Where, Writer
from hooks.writers.console import ConsoleWriter
from hooks.writers.csv_table import CSVWriter
from hooks.writers.json_lines import JSONLinesWriter
from hooks.writers.mlflow import MLflowWriter
from hooks.writers.tensorboard import TensorBoardWriter
from hooks.writers.wandb import WandbWriter

__all__ = [
    "CSVWriter",
    "ConsoleWriter",
    "Image",
    "JSONLinesWriter",
    "MLflowWriter",
    "RunFacts",
    "TensorBoardWriter",
    "WandbWriter",
    "Where",
    "Writer",
]
