# SPDX-License-Identifier: Apache-2.0
"""What a device executes that is no copy: torch's operations on CUDA tensors, run by the CPU in a stream's order.

An operation is put on the current stream with aliases of its tensors (the back addresses of the same memory), and the
caller goes on with outputs that are written later, as with kernels. Allocations, views and plain copies stay torch's
own CUDA code, which calls the software GPU's runtime.

Memory that the caching allocator hands out is spoilt twice: at once, if all has ended that may have used it, so that
who reads a result too early does not find that of the step before; and on the current stream, as late as the order of
streams allows, so that who still uses it on another stream gets NaN.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.cuda._gpu_trace import register_callback_for_memory_deallocation
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

__all__ = ["OnStreams", "alias_of", "enqueue"]

aten = torch.ops.aten

_ALLOCATE = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"}
_NATIVE = {"record_stream", "set_", "resize_", "_pin_memory", "is_pinned", "is_same_size", "lift_fresh"}
_COPIES = {"copy_", "_to_copy", "_copy_from"}
_READ_BY_HOST = {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "equal"}


class _Calls:
    """Python functions that wait to be called by a stream's thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._waiting: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self.failure: BaseException | None = None
        self._entry = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._call)  # kept: the library has its address
        library.software_gpu_enqueue.argtypes = [ctypes.c_void_p, type(self._entry), ctypes.c_int64]
        library.software_gpu_enqueue.restype = None
        library.software_gpu_spoil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        library.software_gpu_spoil.restype = None
        library.software_gpu_back_offset.restype = ctypes.c_int64
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def put(self, stream: int, work: Callable[[], None]) -> None:
        number = next(self._numbers)
        self._waiting[number] = work
        self._library.software_gpu_enqueue(stream, self._entry, number)

    def spoil(self, stream: int, storage: torch.UntypedStorage) -> None:
        self._library.software_gpu_spoil(stream, storage.data_ptr(), storage.nbytes())

    def raise_pending(self) -> None:
        """Raise the error that an earlier call of this thread has left, as torch does after a kernel's launch."""
        if error := self._library.cudaGetLastError():
            raise RuntimeError(f"CUDA error: {self._library.cudaGetErrorString(error).decode()}")

    @functools.cached_property
    def offset(self) -> int:
        """From an address of the device to the one that its operations use."""
        return self._library.software_gpu_back_offset()

    def _call(self, number: int) -> None:
        work = self._waiting.pop(number)
        try:
            with torch.no_grad():
                work()
        except BaseException as error:  # raised at the next call of the host, as CUDA does it
            self.failure = self.failure or error


_calls: _Calls | None = None


def start(library: ctypes.CDLL) -> None:
    """Use this build of the runtime."""
    global _calls
    _calls = _Calls(library)
    register_callback_for_memory_deallocation(lambda address: library.software_gpu_freed())
    torch._C._activate_gpu_trace()


def enqueue(work: Callable[[], None], stream: torch.cuda.Stream | None = None) -> None:
    """Put a function on a stream, by default the current one. It may use aliases, and no CUDA tensors."""
    raise_failure()
    stream = stream or torch.cuda.current_stream()
    _calls.put(stream.cuda_stream, work)


def raise_failure() -> None:
    """Raise what an operation on a stream has raised."""
    if _calls.failure is not None:
        failure, _calls.failure = _calls.failure, None
        raise RuntimeError("software GPU: an operation on a stream failed") from failure


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a CPU tensor, for what runs on the device."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    back = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr() + _calls.offset, torch.device("cpu"), storage.nbytes()
    )
    made = torch.empty(0, dtype=tensor.dtype).set_(back, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        made = made.conj()
    return made.neg() if tensor.is_neg() else made


def _spoilt(new: torch.Tensor) -> torch.Tensor:
    """The same. What the allocator takes anew or again holds nothing of use, nor does anyone else use it."""
    if _is_cuda(new) and new.untyped_storage().nbytes():
        _calls.spoil(torch.cuda.current_stream().cuda_stream, new.untyped_storage())
    return new


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


@functools.cache
def _written(func: Any) -> tuple[str, ...]:
    """The names of the arguments that an operation writes and returns, one for each result; '' for new results."""
    names = {}
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for alias in argument.alias_info.before_set:
                names[alias] = argument.name
    return tuple(
        names.get(next(iter(one.alias_info.before_set), ""), "") if one.alias_info is not None else ""
        for one in func._schema.returns
    )


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**{one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}


def _meta(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _meta(value)
    return torch.device("meta") if isinstance(value, torch.device) else value


class OnStreams(TorchDispatchMode):
    """While it is active, operations on CUDA tensors run on the streams of the software GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        leaves, _ = tree_flatten((args, kwargs))
        on_device = any(_is_cuda(leaf) for leaf in leaves)
        if not on_device and not (isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == "cuda"):
            return func(*args, **kwargs)
        raise_failure()
        if name in _COPIES:
            return _copied(func, name, args, kwargs)
        if name in _ALLOCATE:
            return _spoilt(func(*args, **kwargs))
        if name in _NATIVE or func.is_view:
            return func(*args, **kwargs)
        if name in _READ_BY_HOST:
            return _read(func, args, kwargs)
        return _launched(func, args, kwargs)


def _read(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation whose result the host needs: it waits for the stream."""
    torch.cuda.current_stream().synchronize()
    raise_failure()
    args, kwargs = tree_map_only(torch.Tensor, lambda one: alias_of(one) if _is_cuda(one) else one, (args, kwargs))
    result = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, _to_device, result)


def _to_device(result: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="cuda")
    alias_of(made).copy_(result)
    return made


def _copied(func: Any, name: str, args: tuple, kwargs: dict) -> torch.Tensor:
    """Plain copies are torch's own; conversions are kernels, before or after a plain copy."""
    if name == "_to_copy":
        source = args[0]
        device = kwargs.get("device") or source.device
        dtype = kwargs.get("dtype") or source.dtype
        kind = kwargs.get("memory_format") or torch.preserve_format
        like = source if kind is torch.preserve_format else source.contiguous(memory_format=kind)
        dense = torch.empty_like(like, device="meta", dtype=dtype)
        pinned = bool(kwargs.get("pin_memory")) and device.type == "cpu"
        target = torch.empty_strided(dense.shape, dense.stride(), dtype=dtype, device=device, pin_memory=pinned)
        return _copy(_spoilt(target), source, bool(kwargs.get("non_blocking")))
    target, source, *rest = args
    return _copy(target, source, bool(rest[0] if rest else kwargs.get("non_blocking")))


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    copy = aten.copy_.default
    if _is_cuda(target) and _is_cuda(source):
        if _is_plain(target, source):
            return copy(target, source, non_blocking)
        return _launched(copy, (target, source), {})
    if _is_plain(target, source):
        return copy(target, source, non_blocking)
    # As torch does it: the source is converted where it is, then copied, then spread.
    converted = _spoilt(torch.empty(target.shape, dtype=target.dtype, device=source.device))
    if _is_cuda(source):
        _launched(copy, (converted, source), {})
    else:
        converted.copy_(source)
    if target.is_contiguous():
        return copy(target, converted, non_blocking)
    there = _spoilt(torch.empty(target.shape, dtype=target.dtype, device=target.device))
    copy(there, converted, non_blocking)
    if _is_cuda(target):
        return _launched(copy, (target, there), {})
    return target.copy_(there)


def _is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether one memcpy does it."""
    same = target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride()
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(target)
    return (same and dense) or (
        target.dtype == source.dtype and target.shape == source.shape
        and target.is_contiguous() and source.is_contiguous()
    )  # fmt: skip


_by_thread = threading.local()


def _generator() -> torch.Generator:
    """A CPU generator for one random operation, from the state of the device's, which moves on."""
    of_device = torch.cuda.default_generators[torch.cuda.current_device()]
    offset = of_device.get_offset()
    of_device.set_offset(offset + 4)
    return torch.Generator().manual_seed((of_device.initial_seed() * 1_000_003 + offset) % (1 << 63))


def _takes_generator(func: Any) -> bool:
    return any(one.name == "generator" for one in func._schema.arguments)


def _with_generator(func: Any) -> Any:
    """The overload that takes a generator, of an operation that makes random numbers; others as they are."""
    if torch.Tag.nondeterministic_seeded not in func.tags or _takes_generator(func):
        return func
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    return getattr(func.overloadpacket, name, func)


def _launched(func: Any, args: tuple, kwargs: dict) -> Any:
    """Put the operation on the current stream; its outputs are those it will write."""
    func = _with_generator(func)
    given = _named(func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags and _takes_generator(func):
        given["generator"] = None
    leaves, spec = tree_flatten(given)
    written = _written(func)
    outputs: list[Any] | None = None
    if all(written):
        outputs = [given[name] for name in written]
    else:
        try:
            shapes = func(**tree_unflatten([_on_meta(leaf) for leaf in leaves], spec))
        except (NotImplementedError, RuntimeError):
            return _read(func, args, kwargs)
        results = shapes if isinstance(shapes, (tuple, list)) else (shapes,)
        names = (*written, *[""] * len(results))
        outputs = [
            given[name] if name else _like(result) for name, result in zip(names, results, strict=False)
        ]
    inputs = [
        alias_of(leaf) if _is_cuda(leaf)
        else leaf.clone() if isinstance(leaf, torch.Tensor)
        else torch.device("cpu") if isinstance(leaf, torch.device)
        else leaf
        for leaf in leaves
    ]  # fmt: skip
    call = tree_unflatten(inputs, spec)
    if "generator" in given:
        call["generator"] = _generator()
    targets = [
        alias_of(output) if not name and _is_cuda(output) else None
        for name, output in zip((*written, *[""] * len(outputs)), outputs, strict=False)
    ]

    run = _AS_ON_A_GPU.get(func, func)

    def work() -> None:
        try:
            result = run(**call)
        except Exception as error:
            error.add_note(f"in {func}")
            raise
        results = result if isinstance(result, (tuple, list)) else (result,)
        for target, one in zip(targets, results, strict=False):
            if target is not None:
                target.copy_(one)

    enqueue(work)
    _calls.raise_pending()
    if not func._schema.returns:
        return None
    if isinstance(func._schema.returns[0].type, torch.ListType):
        return outputs
    return outputs[0] if len(func._schema.returns) == 1 else tuple(outputs)


def _sqrt_(self: torch.Tensor) -> torch.Tensor:
    """In place. A GPU's square root is correctly rounded; torch's on the CPU is off by a last bit now and then."""
    if self.dtype is torch.float32:
        array = self.numpy()
        with np.errstate(invalid="ignore"):
            np.sqrt(array, out=array)
        return self
    return self.sqrt_()


def _in_fp32(func: Any) -> Callable[..., Any]:
    """The operation on FP32 copies of 16-bit tensors: a GPU keeps what lies between in FP32, a CPU in 16 bits."""

    def run(**given: Any) -> Any:
        return func(**tree_map_only(torch.Tensor, lambda one: one.float() if one.dtype in _16_BITS else one, given))

    return run


_16_BITS = (torch.bfloat16, torch.float16)
_AS_ON_A_GPU = {
    aten.sqrt_.default: _sqrt_,
    aten.sqrt.default: lambda self: _sqrt_(self.clone()),
    **{func: _in_fp32(func) for func in (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)},
}


def _like(result: Any) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    return _spoilt(torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="cuda"))
