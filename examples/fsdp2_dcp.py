"""A training with FSDP2 that saves by torch.distributed.checkpoint and knows no trainbus: y = sin(x), 20 steps in a second.

python examples/fsdp2_dcp.py SAVE               # begin, and save to the folder SAVE
python examples/fsdp2_dcp.py SAVE LOAD          # go on from the folder LOAD
torchrun --nproc-per-node 2 examples/fsdp2_dcp.py SAVE LOAD
"""

import sys
import warnings
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save as save_to
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network, sharded if there are several processes, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    if distributed.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the error of the network at ``x``."""
    return mse_loss(model(x), torch.sin(x))


def main(save: str, load: str | None = None) -> float:
    """Train 20 steps; return the last loss."""
    model, optimizer = parts()
    if load is not None:
        weights, state = get_state_dict(model, optimizer)
        load_into({"model": weights, "optimizer": state}, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for _ in range(20):
        last = loss(model, torch.linspace(-3, 3, 64).unsqueeze(1))
        optimizer.zero_grad()
        last.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)  # with the names of parameters, not their numbers
    save_to({"model": weights, "optimizer": state}, checkpoint_id=save)
    return last.item()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process needs none
    if distributed.is_torchelastic_launched():
        distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
    torch.set_num_threads(1)  # the network is too small for more
    print(f"loss {main(*sys.argv[1:]):.6f}")
    if distributed.is_initialized():
        distributed.destroy_process_group()
