"""safetensors: its own writer, which does not wait for the disk."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.peers import Resume, Saver, Trained


@contextmanager
def savers(model: nn.Module, work_dir: Path) -> Iterator[Saver]:
    weights = model.state_dict()

    def read(path: Path) -> Iterable[Tensor]:
        loaded = load_file(path)  # it sorts by name
        return [loaded[name] for name in weights]

    yield Saver(lambda path: save_file(weights, path), read)


SAVERS = {"safetensors": savers}


def save_both(trained: Trained, path: Path) -> None:
    """Save weights and the tensors of the optimizer's state; its options would be in a file of their own."""
    model, optimizer = trained
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()["state"].items()
    save_file(weights | {f"{number}.{name}": tensor for number, part in state for name, tensor in part.items()}, path)


def resume(trained: Trained, path: Path) -> None:
    model, optimizer = trained
    weights: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load_file(path).items():
        owner, _, name = key.partition(".")
        (weights if owner == "model" else state.setdefault(int(owner), {}))[name] = tensor
    model.load_state_dict(weights)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


RESUMES = {"safetensors": Resume(save_both, resume)}
