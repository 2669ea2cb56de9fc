"""torch's AveragedModel: with a function per tensor, and with the fused one of torch.optim.swa_utils."""

from collections.abc import Callable

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from benchmarks.peers import TITLES


def ema(model: nn.Module, momentum: float) -> dict[str, Callable[[], None]]:
    title = TITLES["averaged_model"]
    plain = AveragedModel(model, avg_fn=get_ema_avg_fn(1 - momentum))
    fused = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - momentum))
    return {
        f"{title}, multi_avg_fn": lambda: fused.update_parameters(model),
        f"{title}, avg_fn": lambda: plain.update_parameters(model),
    }
