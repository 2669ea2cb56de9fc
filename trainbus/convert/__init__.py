"""Checkpoints from and to other programs: files of ``torch.save``, folders of DCP and of safetensors files.

Nothing of a file is run when it is read.
"""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.convert.contents import Contents, open_contents
    from trainbus.convert.copy_in import save_contents
    from trainbus.convert.dcp import is_dcp, open_dcp
    from trainbus.convert.export import export_tree, export_weights
    from trainbus.convert.folder_files import FolderFiles, verify_folder
    from trainbus.convert.layouts import convert_folder, from_dcp, open_folder, to_dcp
    from trainbus.convert.pth import load_pth, register_objects
    from trainbus.convert.safetensors_folder import open_safetensors, write_safetensors
    from trainbus.convert.torch_file import Pickled
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Contents",
    "FolderFiles",
    "Pickled",
    "convert_folder",
    "export_tree",
    "export_weights",
    "from_dcp",
    "is_dcp",
    "load_pth",
    "open_contents",
    "open_dcp",
    "open_folder",
    "open_safetensors",
    "register_objects",
    "save_contents",
    "to_dcp",
    "verify_folder",
    "write_safetensors",
]
