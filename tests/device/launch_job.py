"""``torchrun`` on the simulated device, whose default process group is a subclass in Python; writes what it has."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed

from tests.device.group import Group
from trainbus.eventloop.training.distributed.collectives import Collectives
from trainbus.eventloop.training.distributed.launch import own_device, process_group
from trainbus.eventloop.training.distributed.ranks import own_group
from trainbus.testing import sim

if __name__ == "__main__":
    sim.module.available = True
    distributed.Backend.register_backend("simulated", Group, devices=[sim.NAME])
    with process_group():
        device = torch.device(own_device(sim.NAME))
        assert type(distributed.group.WORLD) is Group
        everyones = Collectives(own_group("control")).gather((str(device), str(torch.ones(1, device=sim.NAME).device)))
        Path(sys.argv[1], str(distributed.get_rank())).write_text(json.dumps(everyones))
