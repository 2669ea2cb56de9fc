"""Checkpoints: copy the state of a run at once, write it durably, read it back verified.

Knows nothing of the bus. A checkpoint is a tree (dicts, lists, tuples … of numbers, text, arrays and tensors) in one
file that the safetensors package opens.
"""

from eventloop.checkpoint.commit import TEMPORARY_PREFIX, commit_bytes, link, remove
from eventloop.checkpoint.container import CommitInfo, save, write
from eventloop.checkpoint.export import export_tree, export_weights, is_weights
from eventloop.checkpoint.kind import file_kind
from eventloop.checkpoint.load import Description, inspect, load, outline, verify
from eventloop.checkpoint.pth import load_pth
from eventloop.checkpoint.stage import StageBuffer, Staged, stage

__all__ = [
    "TEMPORARY_PREFIX",
    "CommitInfo",
    "Description",
    "StageBuffer",
    "Staged",
    "commit_bytes",
    "export_tree",
    "export_weights",
    "file_kind",
    "inspect",
    "is_weights",
    "link",
    "load",
    "load_pth",
    "outline",
    "remove",
    "save",
    "stage",
    "verify",
    "write",
]
