"""Processes of ``torchrun`` on the simulated device."""

import json
import os
import subprocess
import sys
from pathlib import Path

from .conftest import TAKEN

JOB = Path(__file__).with_name("launch_job.py")  # not imported here: it makes the simulated device that of the process


@TAKEN
def test_each_process_has_the_device_of_its_local_rank_and_a_default_group_in_python(tmp_path: Path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(  # noqa: S603
        [sys.executable, *launch, JOB, tmp_path],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=120,
    )
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == [["sim:0", "sim:0"], ["sim:1", "sim:1"]]
