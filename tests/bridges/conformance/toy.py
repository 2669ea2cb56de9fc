"""The trainer of the page "Write a bridge", whose bridge ``register_host`` makes known."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest.mock import patch

EXAMPLES = Path(__file__).parents[3] / "examples"
with patch.object(sys, "path", [str(EXAMPLES), str(EXAMPLES / "plain"), *sys.path]):
    BRIDGE = importlib.import_module("toy_bridge")
    Job = importlib.import_module("test_toy_bridge").ToyJob
TRAINER = importlib.import_module("toy_trainer")
