"""Kernels of the simulated device: each operation of torch runs the CPU's kernel, later, on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from trainbus.testing.sim import privates, streams
from trainbus.testing.sim.memory import DEVICE, HOST, Block, Spec, allocate, block_of, extent, spec_of
from trainbus.testing.sim.privates import tree_leaves, tree_map

NAME = "sim"
aten = torch.ops.aten
_ON_CPU = privates.DispatchKeySet(privates.DispatchKey.CPU)

generators = [torch.Generator() for _ in range(streams.DEVICES)]


def is_ours(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def empty(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device | None, kind: int = DEVICE) -> torch.Tensor:
    """Allocate a tensor on the current stream of a device, or in pinned memory."""
    index = 0 if kind == HOST else streams.index_of(device)
    nbytes = extent(shape, strides) * dtype.itemsize
    block = Block(nbytes, kind, index, None if kind == HOST else streams.current_stream(index))
    flat = allocate(block)
    if kind == DEVICE:
        flat = aten.view.dtype.redispatch(_ON_CPU, flat, dtype)
        return aten.as_strided.default.redispatch(_ON_CPU, flat, shape, strides, 0)
    return flat.view(dtype).as_strided(shape, strides)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate pinned memory."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return empty(meta.shape, meta.stride(), dtype, None, HOST)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a CPU tensor is in pinned memory."""
    block = block_of(tensor) if tensor.device.type == "cpu" and tensor.layout is torch.strided else None
    return block is not None and block.kind == HOST


class _Facts(NamedTuple):
    """What the schema of an operation tells."""

    view: bool
    written: tuple[tuple[int, str], ...]
    returns: int
    tensors: tuple[int, ...]
    random: bool
    takes_generator: bool


@cache
def _facts(op: Any) -> _Facts:
    schema = privates.schema_of(op)
    arguments = schema.arguments
    written = tuple((n, one.name) for n, one in enumerate(arguments) if one.alias_info and one.alias_info.is_write)
    view = any(one.alias_info and not one.alias_info.is_write for one in arguments)
    takes = any(one.name == "generator" for one in arguments)
    tensors = tuple(n for n, one in enumerate(arguments) if str(one.type) == "Tensor")
    return _Facts(view, written, len(schema.returns), tensors, torch.Tag.nondeterministic_seeded in op.tags, takes)


def dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that has no kernel of its own here: torch's fallback for the backend."""
    # The engine has one thread for each device that a C++ guard counts, and counts one; on the caller's thread it needs none.
    privates.set_multithreading_enabled(False)
    if (own := _own.get(op)) is not None:
        return own(*args, **kwargs)
    facts = _facts(op)
    if facts.view:
        return op.redispatch(_ON_CPU, *args, **kwargs)
    device = next((one.device for one in tree_leaves((args, kwargs)) if is_ours(one)), kwargs.get("device"))
    stream = streams.current_stream(device)
    args = tuple(_as_tensor(one, args[0]) if n in facts.tensors else one for n, one in enumerate(args))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    run = _random(op, args, kwargs, stream.device.index) if facts.random else op
    if facts.written:
        outputs = [kwargs[name] if name in kwargs else args[n] for n, name in facts.written]
        for one in outputs:
            if "out" in privates.overload_of(op) and is_ours(one) and not one.numel():
                _give_size(op, args, kwargs, outputs)
                break
        args, kwargs = tree_map(_argument, (args, kwargs))
        streams.launch(stream, lambda: run(*tree_map(_tensor, args), **tree_map(_tensor, kwargs)))
        return outputs[0] if facts.returns == 1 else (tuple(outputs) if facts.returns else None)
    try:
        shapes = op(*tree_map(_meta, args), **tree_map(_meta, kwargs))
    except (NotImplementedError, RuntimeError):  # the shape depends on the values
        streams.wait(str(op), stream)
        return tree_map(lambda one: one.to(device) if isinstance(one, torch.Tensor) else one, _at_once(run, args, kwargs))
    outputs = tree_map(
        lambda one: empty(one.shape, one.stride(), one.dtype, device) if isinstance(one, torch.Tensor) else one, shapes
    )
    args, kwargs = tree_map(_argument, (args, kwargs))
    targets = [spec_of(one) if is_ours(one) else None for one in tree_leaves(outputs)]

    def kernel() -> None:
        results = tree_leaves(run(*tree_map(_tensor, args), **tree_map(_tensor, kwargs)))
        for target, result in zip(targets, results, strict=True):
            # The CPU's batch norm returns nothing in place of statistics and gradients that are not needed.
            if target is not None and result is not None and result.shape == tuple(target.shape):
                target.tensor().copy_(result)

    streams.launch(stream, kernel)
    return outputs


def _at_once(op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return op(*tree_map(_tensor, tree_map(_argument, args)), **tree_map(_tensor, tree_map(_argument, kwargs)))


def _give_size(op: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
    """Resize empty outputs to what the operation makes."""
    metas = {id(one): _meta(one) for one in outputs}
    args, kwargs = tree_map(lambda one: metas.get(id(one), _meta(one)), (args, kwargs))
    op(*args, **kwargs)
    for one in outputs:
        if one.shape != metas[id(one)].shape:
            _resize(one, metas[id(one)].shape)


def _as_tensor(value: Any, first: Any) -> Any:
    """Return a tensor that changes no dtype, for a number in a tensor's place: torch calls its fallbacks with numbers."""
    if isinstance(value, torch.Tensor) or value is None:
        return value
    wide = torch.tensor(value).to(torch.float64) if isinstance(value, float) else torch.tensor(value)
    fits = isinstance(first, torch.Tensor) and not first.ndim and first.is_floating_point() >= isinstance(value, float)
    return wide.to(first.dtype) if fits else wide


def _argument(value: Any) -> Any:
    """Keep an argument as it is now: what is in the device's memory is read later, a number of the host is not."""
    if is_ours(value):
        return spec_of(value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _tensor(value: Any) -> Any:
    return value.tensor() if isinstance(value, Spec) else value


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else (None if isinstance(value, torch.Generator) else value)


def _random(op: Any, args: Any, kwargs: Any, index: int) -> Callable[..., Any]:
    """Return ``op`` with the device's generator as it is now, and move that on by what the operation will draw."""
    if not _facts(op).takes_generator:
        raise NotImplementedError(f"{op} draws random numbers, and takes no generator")
    drawn = torch.Generator().set_state(generators[index].get_state())
    args, kwargs = tree_map(lambda one: torch.ones(one.shape, dtype=one.dtype) if is_ours(one) else one, (args, kwargs))
    op(*args, **{**kwargs, "generator": generators[index]})
    return lambda *args, **kwargs: op(*args, **{**kwargs, "generator": drawn})


# ------------------------------------------------------------------------------------------- operations of their own


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    form = torch.contiguous_format if memory_format in (None, torch.preserve_format) else memory_format
    meta = torch.empty(size, dtype=dtype, device="meta", memory_format=form)
    return empty(meta.shape, meta.stride(), meta.dtype, device)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return empty(size, stride, dtype or torch.get_default_dtype(), device)


def _resize(tensor: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
    meta = torch.empty(size, dtype=tensor.dtype, device="meta")
    block = block_of(tensor)
    if block is None or block.nbytes < meta.nbytes:
        storage = empty(meta.shape, meta.stride(), meta.dtype, tensor.device).untyped_storage()
        return _set(tensor, storage, 0, meta.shape, meta.stride())
    return _set(tensor, tensor.untyped_storage(), tensor.storage_offset(), meta.shape, meta.stride())


def _set(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    made: torch.Tensor = aten.set_.source_Storage_storage_offset.redispatch(_ON_CPU, tensor, *args)
    return made


def _item(tensor: torch.Tensor) -> Any:
    streams.wait("item", streams.current_stream(tensor.device))
    return spec_of(tensor).tensor().item()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    streams.wait("equal", streams.current_stream(one.device))
    return torch.equal(spec_of(one).tensor(), spec_of(other).tensor())


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    block = block_of(tensor)
    assert block is not None
    block.users[streams.find(stream.stream_id)] = None


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy as CUDA does. Only copies within the device and to or from pinned memory leave the host free."""
    device = (source if is_ours(source) else target).device
    stream = streams.current_stream(device)
    if is_ours(source) and is_ours(target):
        if source.device == target.device:
            return _queue_copy(source, target, stream)
        other = streams.current_stream(target.device)  # copies of two devices are a barrier for both streams
        stream.wait_stream(other)
        _queue_copy(source, target, stream)
        other.wait_stream(stream)
        return target
    if non_blocking and is_pinned(target if is_ours(source) else source):
        return _queue_copy(source, target, stream)
    if is_ours(target):
        _queue_copy(source.clone(), target, stream)
        if not non_blocking:
            streams.wait("copy to the device", stream)
        return target
    streams.wait("copy to the host", stream)
    target.copy_(spec_of(source).tensor())
    return target


def _queue_copy(source: torch.Tensor, target: torch.Tensor, stream: streams.Stream) -> torch.Tensor:
    ends = []
    for one in (source, target):
        block = block_of(one)
        if block is not None and block.kind == HOST:
            block.users[stream] = None
        ends.append(one if block is None else spec_of(one))

    streams.launch(stream, lambda: _tensor(ends[1]).copy_(_tensor(ends[0])))
    return target


def _dropout(source: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop out with the arithmetic of the CPU's ``torch.nn.functional.dropout``, which takes no such kernel."""
    if train is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    noise = torch.empty_like(source).bernoulli_(1 - p)
    return source * noise.div(1 - p), noise.bool()


_own: dict[Any, Callable[..., Any]] = {
    aten.empty.memory_format: _empty,
    aten.empty_strided.default: _empty_strided,
    aten.resize_.default: _resize,
    aten.set_.source_Storage: lambda tensor, storage: _set(tensor, storage, 0, (storage.nbytes() // tensor.itemsize,), (1,)),
    aten.set_.source_Storage_storage_offset: _set,
    aten.set_.source_Tensor: lambda tensor, other: _set(
        tensor, other.untyped_storage(), other.storage_offset(), other.shape, other.stride()
    ),
    privates.local_scalar_dense: _item,
    aten.equal.default: _equal,
    aten.record_stream.default: _record_stream,
    privates.copy_from: _copy,
    privates.copy_from_and_resize: lambda source, target: _copy(source, _resize(target, source.shape)),
    aten.native_dropout.default: _dropout,
}
