"""Checkpoints: copy the state of a run at once, write it durably, read it back verified.

Knows nothing of the bus. A checkpoint is a tree (dicts, lists, tuples … of numbers, text, arrays and tensors) in one
file that the safetensors package opens.
"""

from eventloop.checkpoint.bounds import check_regular, is_plain_name
from eventloop.checkpoint.commit import TEMPORARY_PREFIX, commit_bytes, link, make_directory, remove
from eventloop.checkpoint.container import CommitInfo, save, write
from eventloop.checkpoint.export import export_tree, export_weights, is_weights
from eventloop.checkpoint.foreign import ForeignFormat, convert_foreign, register_format
from eventloop.checkpoint.kind import file_kind
from eventloop.checkpoint.load import CheckpointInfo, inspect, load, outline, verify
from eventloop.checkpoint.overlap import Overlap, Staging, check_staging
from eventloop.checkpoint.pth import load_pth
from eventloop.checkpoint.remote import RemotePath
from eventloop.checkpoint.saver import AsyncSaver
from eventloop.checkpoint.shards import SHARDS, is_sharded, sweep_shards, verify_shards
from eventloop.checkpoint.stage import StageBuffer, StagedTree, stage
from eventloop.checkpoint.store import AnyPath, Store, as_path, store_of
from eventloop.checkpoint.turns import Busy, Turns, check_busy
from eventloop.checkpoint.whole import load_whole
from eventloop.checkpoint.wrappers import unwrapped, without_wrappers

__all__ = [
    "SHARDS",
    "TEMPORARY_PREFIX",
    "AnyPath",
    "AsyncSaver",
    "Busy",
    "CheckpointInfo",
    "CommitInfo",
    "ForeignFormat",
    "Overlap",
    "RemotePath",
    "StageBuffer",
    "StagedTree",
    "Staging",
    "Store",
    "Turns",
    "as_path",
    "check_busy",
    "check_regular",
    "check_staging",
    "commit_bytes",
    "convert_foreign",
    "export_tree",
    "export_weights",
    "file_kind",
    "inspect",
    "is_plain_name",
    "is_sharded",
    "is_weights",
    "link",
    "load",
    "load_pth",
    "load_whole",
    "make_directory",
    "outline",
    "register_format",
    "remove",
    "save",
    "stage",
    "store_of",
    "sweep_shards",
    "unwrapped",
    "verify",
    "verify_shards",
    "without_wrappers",
    "write",
]
