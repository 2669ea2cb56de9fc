"""FSDP2 and an S3 server: saved by 2 processes, resumed by 1, 3 and 4."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eventloop.checkpoint import load_whole

from .test_sharded import assert_restored, restored, trained

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

from ..s3 import BUCKET, S3Server  # noqa: E402 - moto may be missing

URL = f"s3://{BUCKET}/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Runs a server; gives the environment that leads to it."""
    server = S3Server()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = {**keys, "AWS_ENDPOINT_URL": server.url}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(BUCKET)
    yield environment
    s3fs.S3FileSystem.clear_instance_cache()
    server.close()


def there(environment: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    os.environ.update(environment)  # the processes are forked from one that knows no server
    return function(*args)


@pytest.mark.parametrize("options", [{}, {"staging": "overlap", "busy": "replace"}], ids=str)
def test_a_sharded_save_of_2_processes_in_s3_is_bitwise_the_same_on_1_3_and_4(server, ranks, tmp_path, options):
    ranks(there, server, trained, URL, options)
    store = s3fs.S3FileSystem()
    tree = load_whole(f"{URL}/epoch_2.safetensors")
    (directory,) = (name for name in store.ls(URL) if name.endswith(".shards"))  # those of the first epoch are gone
    assert sorted(name.rpartition("/")[2] for name in store.ls(directory)) == [
        "__0.safetensors",
        "__1.safetensors",
        "index.safetensors",
    ]
    for size in (1, 3, 4):
        for found in ranks(there, server, restored, str(tmp_path), URL, size > 1, size=size):
            assert_restored(found, tree)
