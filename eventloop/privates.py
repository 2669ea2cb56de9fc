"""The fence around other libraries: torch's undocumented names, and how each bridge looks up those of its trainer.

torch's are taken here, when trainbus is imported; the other rooms import them from here. Those of a trainer are in the
``privates.py`` of its bridge, and are looked up when a bus is attached.
"""

from __future__ import annotations

import concurrent.futures.process
import multiprocessing.process
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from importlib import import_module
from inspect import signature
from operator import attrgetter
from types import CodeType
from typing import Any, Final
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import distributed
from torch.utils.data import DataLoader

from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.platform import at_fork

Names = Mapping[str, tuple[str, str]]
"""Paths such as ``trainer.strategy._checkpoint_io``, or several of which one is there, with ``|`` between them; for each, where
it is used, and the versions that it was seen in."""


def check_names(library: str, package: str, names: Names, /, **roots: Any) -> None:
    """Look up all names, each from the root with which its path begins.

    Args:
        library: name of the library for ``pip install``.
        package: name of its top-level package.
        names: the names.
        roots: objects by the first part of the paths.

    Raises:
        ConfigurationError: the installed version lacks a name.
    """
    for paths, (used, seen) in names.items():
        path = paths.partition("|")[0]
        root, *parts = path.split(".")
        found = roots[root]
        try:
            for part in parts:
                found = getattr(found, part)
        except AttributeError as error:
            if path != paths:  # another version of the library has another name
                check_names(library, package, {paths.partition("|")[2]: (used, seen)}, **roots)
                continue
            newest = seen.rpartition(" ")[2]
            version = getattr(import_module(package), "__version__", "")
            raise ConfigurationError(
                f"{library} {version} has no {path} ({type(found).__name__} lacks {part!r}), which "
                f"trainbus needs ({used}); it was seen in {seen}: pip install '{library}=={newest}', or a newer trainbus"
            ) from error


# ---------------------------------------------------------------------------------------------------------------- torch

_SEEN: Final = "2.11.0 to 2.14.1"
TORCH: Final = {
    "torch._foreach_copy_": ("checkpoint/, hooks/averages.py: copy many tensors by one call", _SEEN),
    "torch._foreach_lerp_": ("hooks/averages.py: average many tensors by one call", _SEEN),
    "torch._foreach_mul_": ("training/update.py: scale the gradients of a partial window", _SEEN),
    "torch._C._set_grad_enabled": ("offload/scalars.py: a tenth of the time of torch.no_grad()", _SEEN),
    "torch._utils.ExceptionWrapper.reraise": ("training/data.py: errors of a dataset", _SEEN),
    "torch._utils._rebuild_tensor_v2": ("convert/torch_file.py: the format of torch.save", _SEEN),
    "torch.storage._dtype_to_storage_type_map": ("convert/torch_file.py: the format of torch.save", _SEEN),
    "torch.UntypedStorage._cdata": ("convert/torch_file.py: which tensors share memory", _SEEN),
    "torch.Tensor._backward_hooks": ("convert/torch_file.py: a tensor that torch.save writes with more", _SEEN),
    "torch.Tensor._indices": ("checkpoint/objects.py: the parts of a sparse tensor that is not coalesced", _SEEN),
    "torch.Tensor._values": ("likewise", _SEEN),
    "torch.Tensor._version": ("checkpoint/overlap.py, training/saves/capture.py: a tensor changed", _SEEN),
    "torch.utils._python_dispatch.TorchDispatchMode": ("offload/collectives.py: refuse collectives", _SEEN),
    "torch.utils._pytree.tree_map": ("bridges/: replace tensors", _SEEN),
    "torch.utils.data._utils.fetch._MapDatasetFetcher": ("training/data.py: errors of a dataset", _SEEN),
    "torch.utils.data._utils.fetch._IterableDatasetFetcher": ("training/data.py: errors of a dataset", _SEEN),
    "loader._get_iterator": ("training/loaders.py: workers start here", _SEEN),
    "loader._iterator": ("training/rng.py: persistent workers", _SEEN),
    "module._parameters": ("training/saves/capture.py, hooks/pairs.py: all tensors, without a walk for each module", _SEEN),
    "module._buffers": ("likewise; training/preflight.py: put buffers back", _SEEN),
    "module._modules": ("hooks/pairs.py: a part was replaced", _SEEN),
}
"""Looked up when trainbus is imported."""
_DISTRIBUTED: Final = {
    "torch.distributed.distributed_c10d._get_default_store": ("training/, observe/: messages without a collective", _SEEN),
    "torch.distributed.ProcessGroup._get_backend": ("training/distributed/ranks.py: the timeout of the default group", _SEEN),
    "torch.distributed.ProcessGroup._device_types": ("training/distributed/ranks.py: likewise", _SEEN),
    "torch._C._distributed_c10d.Backend.Options._timeout": ("training/distributed/ranks.py: likewise", _SEEN),
}
"""Likewise, where torch was built with ``torch.distributed``."""
SHARDED: Final[Names] = {
    "tensor.DTensor.__create_chunk_list__": ("checkpoint/sharded.py: which part of a tensor this process has", _SEEN),
}
"""Looked up with checkpoint/sharded.py, since the import takes half a second."""
SCALER: Final[Names] = {
    "scaler._per_optimizer_states": ("training/update.py: did the gradients overflow?", _SEEN),
}
"""Looked up when a run begins that has a gradient scaler."""
OPTIONAL: Final[Names] = {
    "torch._C._cuda_getCurrentRawStream": ("device.py: the stream that makes a scalar; with CUDA only", _SEEN),
    "module._join_config": ("training/distributed/shares.py: a module inside torch's Join", _SEEN),
    "optimizer._step_supports_amp_scaling": ("training/update.py: a fused optimizer", _SEEN),
    "state._metadata": ("checkpoint/wrappers.py: the versions of modules in a state_dict", _SEEN),
    "scheduler._schedulers": ("hooks/schedule.py: SequentialLR and ChainedScheduler", _SEEN),
    "space._np_random": (
        "training/keep.py: the generator of an environment's space, None until it is used",
        "Gym's interface, 1.0 to 1.4",
    ),
    "lock._is_owned": ("locks.py: whether this thread holds a lock, as threading.Condition asks", "CPython 3.11 to 3.14"),
    "executor._processes": ("offload/process.py: the worker, to kill it and to see how it died", "CPython 3.11 to 3.14"),
    "process._threads_wakeups": ("offload/process.py: executors, of which a fork has no process", "CPython 3.11 to 3.14"),
    "process._children": ("offload/process.py: likewise; it would wait for them when it exits", "CPython 3.11 to 3.14"),
    "threading._register_atexit": ("bus/lifecycle.py: close before executors end", "CPython 3.11 to 3.14"),
}
"""Of some objects only, so that nothing can look them up beforehand."""


def _check_torch() -> None:
    roots = {"torch": torch, "module": torch.nn.Module(), "loader": DataLoader([0])}  # type: ignore[arg-type]  # a list is data
    check_names("torch", "torch", TORCH | (_DISTRIBUTED if distributed.is_available() else {}), **roots)


_check_torch()
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: E402 - once it was looked up
from torch.utils._pytree import tree_map as tree_map  # noqa: E402

foreach_copy_: Final = torch._foreach_copy_
foreach_lerp_: Final = torch._foreach_lerp_
foreach_mul_: Final = torch._foreach_mul_
set_grad_enabled: Final = torch._C._set_grad_enabled
rebuild_tensor: Final = torch._utils._rebuild_tensor_v2
storage_kinds: Final = torch.storage._dtype_to_storage_type_map
raw_stream: Final[Any] = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The current stream of a device as a number, in a fraction of the time of an object; None without CUDA."""
version_of: Final = attrgetter("_version")
backward_hooks_of: Final = attrgetter("_backward_hooks")
READS_SAMPLES: Final[tuple[CodeType, ...]] = (
    torch.utils.data._utils.fetch._MapDatasetFetcher.fetch.__code__,
    torch._utils.ExceptionWrapper.reraise.__code__,
)
"""Code that reads map-style samples, here or in a worker."""
READS_NEXT: Final[CodeType] = torch.utils.data._utils.fetch._IterableDatasetFetcher.fetch.__code__
"""Code that reads an iterable dataset."""
SPACE_GENERATOR: Final = "_np_random"
"""The attribute in which the space of an environment has its generator."""


def is_owned(lock: Any) -> bool:
    """Return True if this thread holds a ``threading.RLock``."""
    held: bool = lock._is_owned()
    return held


def process_of(executor: ProcessPoolExecutor) -> Any:
    """Return the process of an executor that has started one."""
    (process,) = executor._processes.values()
    return process


def forget_processes() -> None:
    """Leave executors and processes to the process that has started them, in a fork of it."""
    concurrent.futures.process._threads_wakeups.clear()
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]


at_fork(in_child=forget_processes)
before_executors_end: Final[Callable[[Callable[[], object]], object]] = threading._register_atexit  # type: ignore[attr-defined]
"""Registers what is called when the main thread has ended, before executors wait for their processes, and before ``atexit``."""


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse tensor, also of one that is not coalesced."""
    return tensor._indices(), tensor._values()


def parts_of(
    module: torch.nn.Module,
) -> tuple[dict[str, torch.nn.Parameter | None], dict[str, torch.Tensor | None], dict[str, torch.nn.Module | None]]:
    """Return the dicts in which a module has its own parameters, buffers and children."""
    return module._parameters, module._buffers, module._modules


def tensors_of(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of modules, without those of their children."""
    for module in modules:
        parameters, buffers, _ = parts_of(module)
        yield from (one for one in (*parameters.values(), *buffers.values()) if one is not None)


def starts_own_workers(kind: type[DataLoader[Any]]) -> bool:
    """Return True if a class of loaders starts workers in a way of its own."""
    return kind._get_iterator is not DataLoader._get_iterator


def workers_of(loader: Iterable[Any]) -> Any:
    """Return the iterator with a loader's persistent workers; None before they start, and for other iterables."""
    return getattr(loader, "_iterator", None)


def address_of(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for all objects of one storage."""
    address: int = storage._cdata
    return address


def untyped_bytes(storage: Any) -> torch.UntypedStorage:
    """Return the bytes of a ``TypedStorage``; its public method warns."""
    found: torch.UntypedStorage = storage._untyped_storage
    return found


def is_overflown(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the scaler found a gradient that is not finite, as ``GradScaler.step`` does."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(flag.item()) for flag in found.values())


def checks_overflow(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the kernel of a fused optimizer checks for overflow itself; other optimizers lack the attribute."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


WRAPPED_AS: dict[str, str] = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",  # torch/distributed/fsdp/_common_utils.py
    "OptimizedModule": "_orig_mod",  # torch.compile's
    "ActivationWrapper": "_checkpoint_wrapped_module",  # torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py
}
"""The name of the module inside a wrapper, by the name of the wrapper's class."""


_inner: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()


def register_wrapper(kind: str, inner: str) -> None:
    """Register the name of the module inside a wrapper of another library, by the name of the wrapper's class."""
    WRAPPED_AS[kind] = inner
    _inner.clear()


def inner_of(kind: type) -> str | None:
    """Return the name of the module inside a wrapper of this class; None for another class."""
    if kind not in _inner:
        _inner[kind] = next((WRAPPED_AS[one.__name__] for one in kind.__mro__ if one.__name__ in WRAPPED_AS), None)
    return _inner[kind]


def has_wrapper_names(names: Iterable[str]) -> bool:
    """Return whether there may be a wrapper's name among the keys of a ``state_dict``; quick, for 20,000 of them."""
    together = "\0".join(names)
    return any(f"{inner}." in together for inner in WRAPPED_AS.values())


def metadata_of(state: Any) -> Mapping[str, Any] | None:
    """Return the versions of the modules that ``Module.state_dict()`` has put beside the weights, if they are there."""
    return getattr(state, "_metadata", None)


def with_metadata(weights: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return weights as ``Module.state_dict()`` returns them: in order, with the versions of the modules in ``_metadata``.

    By these versions a module recognises state that an older version of it has saved.
    """
    if metadata is None:
        return weights
    ordered = OrderedDict(weights)
    vars(ordered)["_metadata"] = metadata
    return ordered


def schedulers_in(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers that a scheduler steps."""
    found: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return found


def is_joined(module: torch.nn.Module) -> bool:
    """Return True inside torch's Join, which sets an attribute (torch/distributed/algorithms/join.py)."""
    return bool(getattr(getattr(module, "_join_config", None), "enable", False))


def chunk_of(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this process's part of a sharded tensor (``DTensor``) begins in the whole one, and its shape.

    Raises:
        ValueError: the parts are still to be added up.
    """
    check_names("torch", "torch", SHARDED, tensor=import_module("torch.distributed.tensor"))
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def fsdp_mesh(module: torch.nn.Module) -> Any:
    """Return the mesh of the copies and parts that ``fully_shard`` makes of a module; None if it has no parameters of its own.

    Other dimensions, of tensor parallelism, are not in it (torch/distributed/fsdp/_fully_shard/_fsdp_common.py).
    """
    get: Any = getattr(module, "_get_fsdp_state", None)
    state: Any = None if get is None else get()
    # One before torch 2.12.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return getattr(getattr(groups[0], "mesh_info", None), "mesh", None)


def root_size(mesh: Any, dimension: str) -> int | None:
    """Return the size of a dimension of the mesh that a mesh was cut from, 1 if it has none; None if that is unknown."""
    try:
        root = mesh._get_root_mesh()
        names = root.mesh_dim_names or ()
        return int(root.mesh.shape[names.index(dimension)]) if dimension in names else 1
    except AttributeError:  # of another torch than 2.13 (torch/distributed/device_mesh.py)
        return None


def check_scaler(scaler: torch.amp.GradScaler) -> None:
    """Raise ConfigurationError if :func:`is_overflown` cannot look into a scaler that is enabled."""
    if scaler.is_enabled():
        check_names("torch", "torch", SCALER, scaler=scaler)


def default_store() -> Any:
    """Return the store of the default process group. Its type stub lacks some methods."""
    return distributed.distributed_c10d._get_default_store()


def not_compiled(function: Any, reason: str) -> Any:
    """Return a function that ``torch.compile`` does not trace; its errors give the reason."""
    disable: Any = torch.compiler.disable
    return disable(function, reason=reason) if "reason" in signature(disable).parameters else disable(function)  # torch 2.7


def let_gloo_go() -> None:
    """Give the threads of gloo groups time to release the tensors of our last collective, for which each needs the GIL.

    Until torch 2.8, ``destroy_process_group()`` keeps the GIL while it waits for these threads, and may wait for ever
    (pytorch/pytorch#56297; #154976 mended it).
    """
    if torch.__version__ < "2.8":
        time.sleep(0.1)


def tcp_store(store: Any) -> Any:
    """Return the TCPStore below prefixes; None if it is another kind, which no host and port lead to."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store if isinstance(store, distributed.TCPStore) else None  # type: ignore[attr-defined]


def second_connection(store: Any) -> Any:
    """Return a store with the same keys: a thread that waits in a TCPStore keeps its lock."""
    if hasattr(store, "clone"):
        return store.clone()
    tcp = tcp_store(store)  # older torches have no clone()
    if tcp is None:
        return store
    # Prefixes cannot be read, so all ranks take another one, which is new for each of these stores.
    prefix = store.compare_set("trainbus/connection", "", uuid4().hex).decode()
    again = distributed.TCPStore(tcp.host, tcp.port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    return distributed.PrefixStore(prefix, again)  # type: ignore[attr-defined]


def default_timeout() -> timedelta | None:
    """Return the timeout of ``init_process_group``; None if the backend does not tell."""
    world: Any = distributed.group.WORLD
    backends = map(world._get_backend, world._device_types)  # none of a subclass in Python
    found: timedelta | None = getattr(getattr(next(backends, None), "options", None), "_timeout", None)
    return found
