"""Where scalars go. A writer of your own derives from :class:`Writer`; it is called from the logger's thread only."""

from hooks.writers.base import RunFacts, Where, Writer
from hooks.writers.console import ConsoleWriter
from hooks.writers.json_lines import JSONLinesWriter
from hooks.writers.tensorboard import TensorBoardWriter

__all__ = ["ConsoleWriter", "JSONLinesWriter", "RunFacts", "TensorBoardWriter", "Where", "Writer"]
