"""trainbus with obstore for fsspec's file system of S3."""

from collections.abc import Iterator
from contextlib import contextmanager

import obstore.fsspec
from torch import nn

from benchmarks.harness import SUBJECT
from benchmarks.peers import Saver, trainbus


@contextmanager
def stores(model: nn.Module, root: str) -> Iterator[Saver]:
    obstore.fsspec.register("s3")
    with trainbus.savers(model, root) as saver:
        yield saver


STORES = {f"{SUBJECT}, obstore": stores}
