"""s3torchconnector: torch.save into its writer, and its storage for torch.distributed.checkpoint."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from s3torchconnector import S3Checkpoint, S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from torch import Tensor, nn

from benchmarks.peers import Saver
from benchmarks.peers.distributed import in_store

CONFIG = S3ClientConfig(force_path_style=True)  # a server without a domain for each bucket


@contextmanager
def stores(model: nn.Module, _: str) -> Iterator[Saver]:
    weights = model.state_dict()
    checkpoint = S3Checkpoint(region(), os.environ["AWS_ENDPOINT_URL"], CONFIG)

    def save(url: str) -> None:
        with checkpoint.writer(url) as file:
            torch.save(weights, file)

    def read(url: str) -> Iterable[Tensor]:
        with checkpoint.reader(url) as file:
            return torch.load(file).values()

    yield Saver(save, read)


def region() -> str:
    return os.environ["AWS_DEFAULT_REGION"]


def writer(url: str) -> Any:
    return S3StorageWriter(region(), url, CONFIG)


def reader(url: str) -> Any:
    return S3StorageReader(region(), url, CONFIG)


STORES = {
    "s3torchconnector": stores,
    "DCP, s3torchconnector": partial(in_store, dcp.save, writer, reader),
    "DCP async, s3torchconnector": partial(in_store, dcp.async_save, writer, reader),
}
