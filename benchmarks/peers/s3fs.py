"""torch.save into a file that fsspec opens in a store."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import fsspec
import s3fs  # noqa: F401 - fsspec's package for S3
import torch
from torch import Tensor, nn

from benchmarks.peers import Saver


@contextmanager
def stores(model: nn.Module, _: str) -> Iterator[Saver]:
    weights = model.state_dict()

    def save(url: str) -> None:
        with fsspec.open(url, "wb") as file:
            torch.save(weights, file)

    def read(url: str) -> Iterable[Tensor]:
        with fsspec.open(url, "rb") as file:
            return torch.load(file).values()

    yield Saver(save, read)


STORES = {"torch.save into s3fs": stores}
