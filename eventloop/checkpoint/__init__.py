"""Checkpoints: copy the state of a run at once, write it durably, read it back verified.

Knows nothing of the bus. A checkpoint is a tree (dicts, lists, tuples … of numbers, text, arrays and tensors) in one
file that the safetensors package opens.
"""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.eventloop.checkpoint.background import BackgroundWriter, Busy, PendingSaves, awaiting_steps, steps_awaited
    from trainbus.eventloop.checkpoint.commit import TEMPORARY_PREFIX
    from trainbus.eventloop.checkpoint.folder import (
        FORMER_PREFIX,
        STATE_FILE,
        commit_folder,
        discard_folder,
        files_in,
        free_name,
        is_folder,
        keep_as_old,
        remove_leftover,
        sync_folder,
    )
    from trainbus.eventloop.checkpoint.header import (
        checkpoints_in,
        content_of,
        file_kind,
        inspect,
        is_checkpoint,
        plain_tree,
        verify,
    )
    from trainbus.eventloop.checkpoint.marks import is_dtensor, is_sharded
    from trainbus.eventloop.checkpoint.overlap import Overlap, Staging
    from trainbus.eventloop.checkpoint.plain_types import weights_only
    from trainbus.eventloop.checkpoint.reading import load, outline
    from trainbus.eventloop.checkpoint.remote import RemotePath
    from trainbus.eventloop.checkpoint.saver import AsyncSaver
    from trainbus.eventloop.checkpoint.scores import SCORES, FileScores, note_scores, read_scores, scores_of
    from trainbus.eventloop.checkpoint.shards import (
        COMMITTED,
        INDEX,
        SHARDS_SUFFIX,
        check_parts,
        own_parts,
        part_files,
        read_shards,
        remove_parts,
        remove_whole,
        sharded_in,
        sweep_shards,
        verify_shards,
    )
    from trainbus.eventloop.checkpoint.staging import CommitInfo, StageBuffer, StagedTree, WriteFile, save, stage, write
    from trainbus.eventloop.checkpoint.store import (
        AnyPath,
        AsPath,
        as_path,
        check_regular,
        commit_bytes,
        is_plain_name,
        link,
        list_directories,
        list_files,
        make_directory,
        open_file,
        remove,
        symlink,
    )
    from trainbus.eventloop.checkpoint.together import Together
    from trainbus.eventloop.checkpoint.tree import packed
    from trainbus.eventloop.checkpoint.weights import is_weights, load_whole, pick_weights
    from trainbus.eventloop.checkpoint.wrappers import (
        WrapperNames,
        same_but_for_wrappers,
        unwrapped,
        without_wrappers,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "COMMITTED",
    "FORMER_PREFIX",
    "INDEX",
    "SCORES",
    "SHARDS_SUFFIX",
    "STATE_FILE",
    "TEMPORARY_PREFIX",
    "AnyPath",
    "AsPath",
    "AsyncSaver",
    "BackgroundWriter",
    "Busy",
    "CommitInfo",
    "FileScores",
    "Overlap",
    "PendingSaves",
    "RemotePath",
    "StageBuffer",
    "StagedTree",
    "Staging",
    "Together",
    "WrapperNames",
    "WriteFile",
    "as_path",
    "awaiting_steps",
    "check_parts",
    "check_regular",
    "checkpoints_in",
    "commit_bytes",
    "commit_folder",
    "content_of",
    "discard_folder",
    "file_kind",
    "files_in",
    "free_name",
    "inspect",
    "is_checkpoint",
    "is_dtensor",
    "is_folder",
    "is_plain_name",
    "is_sharded",
    "is_weights",
    "keep_as_old",
    "link",
    "list_directories",
    "list_files",
    "load",
    "load_whole",
    "make_directory",
    "note_scores",
    "open_file",
    "outline",
    "own_parts",
    "packed",
    "part_files",
    "pick_weights",
    "plain_tree",
    "read_scores",
    "read_shards",
    "remove",
    "remove_leftover",
    "remove_parts",
    "remove_whole",
    "same_but_for_wrappers",
    "save",
    "scores_of",
    "sharded_in",
    "stage",
    "steps_awaited",
    "sweep_shards",
    "symlink",
    "sync_folder",
    "unwrapped",
    "verify",
    "verify_shards",
    "weights_only",
    "without_wrappers",
    "write",
]
