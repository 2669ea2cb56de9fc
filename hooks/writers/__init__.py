"""Writers of scalars, images, histograms and texts. Derive your own from :class:`Writer`; only the logger's thread calls it."""

from hooks.writers.base import Image, Row, RunFacts, Where, Writer
from hooks.writers.console import ConsoleWriter
from hooks.writers.csv_table import CSVWriter
from hooks.writers.histogram import BinCounts
from hooks.writers.json_lines import JSONLinesWriter
from hooks.writers.mlflow import MLflowWriter
from hooks.writers.tensorboard import TensorBoardWriter
from hooks.writers.wandb import WandbWriter

__all__ = [
    "BinCounts",
    "CSVWriter",
    "ConsoleWriter",
    "Image",
    "JSONLinesWriter",
    "MLflowWriter",
    "Row",
    "RunFacts",
    "TensorBoardWriter",
    "WandbWriter",
    "Where",
    "Writer",
]
