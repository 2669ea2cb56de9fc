"""The device module of the simulated device, ``torch.get_device_module("sim")``, and its registration."""

from __future__ import annotations

from typing import Any

import torch

from trainbus.testing.sim import kernels, memory, privates, streams
from trainbus.testing.sim.kernels import NAME, generators


class Module:
    """The API of ``torch.cuda``, as far as device modules share it."""

    available = False
    """Whether torch finds the device. Off outside of the tests of it, since others test a machine without one."""

    Stream, Event = streams.Stream, streams.Event
    current_stream = staticmethod(streams.current_stream)
    default_stream = staticmethod(streams.default_stream)
    set_stream = staticmethod(streams.set_stream)
    stream = staticmethod(streams.stream)
    synchronize = staticmethod(streams.synchronize)
    current_device = staticmethod(streams.current_device)
    set_device = staticmethod(streams.set_device)
    device = staticmethod(streams.device)

    def is_available(self) -> bool:
        return self.available

    is_initialized = is_available

    def device_count(self) -> int:
        return streams.DEVICES if self.available else 0

    def get_device_name(self, device: Any = None) -> str:
        return f"Simulated device {streams.index_of(device)}"

    def memory_allocated(self, device: Any = None) -> int:
        return memory.allocated(streams.index_of(device))

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return generators[streams.index_of(device)].get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        generators[streams.index_of(device)].set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [one.get_state() for one in generators]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        for one, state in zip(generators, new_states, strict=True):
            one.set_state(state)

    def manual_seed(self, seed: int) -> None:
        generators[streams.current_device()].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for one in generators:
            one.manual_seed(seed)

    def _is_in_bad_fork(self) -> bool:
        return False


class _Hooks(privates.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return module.available

    def has_primary_context(self, index: int) -> bool:
        return module.available

    def is_built(self) -> bool:
        return True


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != NAME:
        return _clone_of_torch(storage)
    block = memory.block_at(storage.data_ptr())
    flat = memory.Spec(block, torch.uint8, 0, (block.nbytes,), (1,))
    copied = kernels.empty((block.nbytes,), (1,), torch.uint8, storage.device)
    target = memory.spec_of(copied)
    streams.launch(streams.current_stream(storage.device), lambda: target.tensor().copy_(flat.tensor()))
    return copied.untyped_storage()


def _cast(op: Any, dtype: torch.dtype | None) -> Any:
    """Return ``op`` in a dtype, by default that of ``torch.autocast``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        to = dtype or torch.get_autocast_dtype(NAME)
        args = tuple(one.to(to) if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in args)
        with privates.ExcludeDispatchKeyGuard(privates.DispatchKeySet(privates.DispatchKey.AutocastPrivateUse1)):
            return op(*args, **kwargs)

    return run


module = Module()
privates.setup_backend(NAME, backend_module=module, hook=_Hooks())
_library = torch.library.Library("_", "IMPL")  # kept: its end would take the kernels back
_library.fallback(kernels.dispatch, "PrivateUse1")
_library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_autocast = torch.library.Library("aten", "IMPL")  # of the CPU's long lists what the tests need
_autocast.impl("linear", _cast(torch.ops.aten.linear.default, None), "AutocastPrivateUse1")
_autocast.impl("cross_entropy_loss", _cast(torch.ops.aten.cross_entropy_loss.default, torch.float32), "AutocastPrivateUse1")
# torch makes a storage with the allocator of the backend, which only C++ can register. Used by copy.deepcopy.
_clone_of_torch = torch.UntypedStorage.clone
torch.UntypedStorage.clone = _clone_storage
