"""Examples are scripts, not a package: the fixture ``example`` loads one by name."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def load_example(name: str) -> ModuleType:
    full = f"examples_{name}"
    if full not in sys.modules:  # once: an event may be declared in it
        spec = importlib.util.spec_from_file_location(full, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture
def example() -> Callable[[str], ModuleType]:
    return load_example
