"""Writers of scalars, images, histograms and texts. Derive your own from :class:`Writer`; only the logger's thread calls it."""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.hooks.writers.base import Image, Row, RunFacts, Where, Writer
    from trainbus.hooks.writers.console import ConsoleWriter
    from trainbus.hooks.writers.csv_table import CSVWriter
    from trainbus.hooks.writers.histogram import BinCounts
    from trainbus.hooks.writers.json_lines import JSONLinesWriter
    from trainbus.hooks.writers.mlflow import MLflowWriter
    from trainbus.hooks.writers.tensorboard import TensorBoardWriter
    from trainbus.hooks.writers.wandb import WandbWriter
else:
    __getattr__, __dir__ = lazy(__name__)

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
