"""The search of the site finds the right page first: the theme's own search, on the index of the built site."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("docs")

PAGES = {
    "resume": "guides/preemption",
    "early stopping": "guides/validation",
    "TensorBoard": "guides/loggers",
    "DDP": "guides/distributed",
    "mixed precision": "guides/precision",
    "accumulation": "guides/precision",
    "FAQ": "help/faq",
    "hyperparameter": "guides/hyperparameters",
    "SLURM": "guides/slurm",
    "Jupyter": "guides/notebooks",
    "out of memory": "help/troubleshooting",
    "learning rate finder": "guides/schedules",
    "gradient clipping": "guides/precision",
    "freeze layers": "guides/freeze",
    "two optimizers": "guides/optimizers",
    "GAN": "guides/optimizers",
    "custom metric": "guides/validation",
    "seed": "guides/seeds",
    "wandb": "guides/loggers",
    "checkpoint best": "guides/checkpoints",
    "memory leak": "guides/memory-leaks",
    "NaN": "help/troubleshooting",
    "reinforcement learning": "guides/reinforcement-learning",
    "RLHF": "guides/generation",
    "why not Lightning": "start/when",
    "multi GPU": "guides/distributed",
    "log every n steps": "guides/loggers",
    "save every n steps": "guides/checkpoints",
    "progress bar": "guides/loggers",
    "warmup": "guides/schedules",
    "callback": "guides/write-a-hook",
    "profiling": "guides/find-a-slow-hook",
    "fine-tune": "guides/freeze",
    "S3": "guides/object-storage",
    "Slack": "guides/alerts",
    "compare runs": "guides/many-runs",
    "fast_dev_run": "guides/check",
    "EMA": "guides/ema",
}


@pytest.fixture(scope="module")
def found(site):
    """The pages that the search finds for each query, best first."""
    node = shutil.which("node") or pytest.skip("Node.js is not installed")
    script = [node, str(Path(__file__).with_name("search.js")), str(site)]
    searched = subprocess.run(script, input="\n".join(PAGES), text=True, capture_output=True, check=True)  # noqa: S603
    return {line["query"]: line["pages"] for line in map(json.loads, searched.stdout.splitlines())}


@pytest.mark.parametrize("query", PAGES)
def test_the_right_page_comes_first(found, query):
    assert found[query][:1] == [f"{PAGES[query]}.html"]
