"""The undocumented names of torch that the simulated device uses: those of its dispatcher."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.utils._pytree
import torch.utils.backend_registration

from trainbus.eventloop.privates import Names, check_names

_SEEN: Final = "2.13.0"
NAMES: Final[Names] = {
    "torch._C.DispatchKeySet": ("kernels.py, module.py: where an operation goes", _SEEN),
    "torch._C.DispatchKey": ("kernels.py, module.py: likewise", _SEEN),
    "torch._C._ExcludeDispatchKeyGuard": ("module.py: an operation of autocast, called in its own", _SEEN),
    "torch._C._set_multithreading_enabled": ("kernels.py: backward on the caller's thread", _SEEN),
    "torch._C._autograd.DeviceType": ("streams.py: the number of the type of device", _SEEN),
    "torch._C._acc.PrivateUse1Hooks": ("module.py: torch asks whether the device is there", _SEEN),
    "torch.utils._pytree.tree_leaves": ("kernels.py: tensors in arguments", _SEEN),
    "torch.utils._pytree.tree_map": ("kernels.py: likewise", _SEEN),
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": ("module.py: registers the device", _SEEN),
    "torch.ops.aten._copy_from": ("kernels.py: an operation with a kernel of its own", _SEEN),
    "torch.ops.aten._copy_from_and_resize": ("kernels.py: likewise", _SEEN),
    "torch.ops.aten._local_scalar_dense": ("kernels.py: likewise", _SEEN),
    "operation._schema": ("kernels.py: the arguments of an operation", _SEEN),
    "operation._overloadname": ("kernels.py: the operations that write into out=", _SEEN),
}
check_names("torch", "torch", NAMES, torch=torch, operation=torch.ops.aten.add.out)

DispatchKey: Final = torch._C.DispatchKey
DispatchKeySet: Final = torch._C.DispatchKeySet
ExcludeDispatchKeyGuard: Final = torch._C._ExcludeDispatchKeyGuard
set_multithreading_enabled: Final = torch._C._set_multithreading_enabled
DeviceType: Final = torch._C._autograd.DeviceType
PrivateUse1Hooks = torch._C._acc.PrivateUse1Hooks
tree_leaves: Final = torch.utils._pytree.tree_leaves
tree_map: Final = torch.utils._pytree.tree_map
setup_backend: Final = torch.utils.backend_registration._setup_privateuseone_for_python_backend
copy_from: Final = torch.ops.aten._copy_from.default
copy_from_and_resize: Final = torch.ops.aten._copy_from_and_resize.default
local_scalar_dense: Final = torch.ops.aten._local_scalar_dense.default


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation."""
    return operation._schema


def overload_of(operation: Any) -> str:
    """Return the name of an operation's overload, such as ``out``."""
    return str(operation._overloadname)
