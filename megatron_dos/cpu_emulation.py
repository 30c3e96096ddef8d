# SPDX-License-Identifier: Apache-2.0
"""Run an unmodified Megatron script on a machine without a GPU.

    python -m megatron_dos.cpu_emulation SCRIPT ARGS...
    torchrun --nproc-per-node 2 -m megatron_dos.cpu_emulation SCRIPT ARGS...

The first form trains with one rank, and needs no launcher's environment variables.

Importing this module changes nothing. `activate()` (which the command line calls first) puts a CPU stand-in in the
place of `torch.cuda`, so that code written for a GPU runs on the CPU, with gloo in the place of NCCL. It is for the
demo and the tests alone: no other module of the package imports it, and it refuses to start where a GPU is present,
unless `--force` or MEGATRON_DOS_FORCE_CPU_EMULATION=1 says otherwise.

What is not covered here fails with an error that names it. Nothing pretends to work.

[Note: two kinds of memory] All tensors live in host memory here, but the code under test must still be able to tell a
device tensor from a host tensor, and must be caught when it mixes them. Where memory belongs is a property of the
storage, so host storages carry a mark, and every tensor without it counts as a device tensor: the many results of
autograd then need no attention. Marked storages come from factories without a device or with device='cpu', from
.cpu(), pin_memory(), numpy and torch.load. Views share the storage, hence the mark. For operations that make new memory
host tensors are instances of HostTensor, whose __torch_function__ marks the results, and refuses an operation on a
host and a device tensor as a GPU would. `tensor.device` is torch.device('cpu') for host tensors and
torch.device('cpu', 0) for device tensors: `.type` is 'cpu' for both, since a CPU kernel may touch both, yet
`device=other.device` keeps the kind, and the two never compare equal.

[Note: two generators] CPU operations draw from torch's default generator, and here they stand for device operations, so
that one is the device's. Host-side draws, which must not disturb it, get a second generator: torch.get_rng_state,
torch.manual_seed, DataLoader, and draws into host tensors (parameters are often initialised on the host) use it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import importlib.util
import os
import runpy
import subprocess
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["MEGATRON_ARGUMENTS", "HostTensor", "NotCoveredError", "activate", "adapt_megatron", "is_active", "main"]

FORCE_VARIABLE = "MEGATRON_DOS_FORCE_CPU_EMULATION"

# What Megatron must be told on a CPU, and what satisfies it: NCCL, Transformer Engine and fused kernels need a GPU.
MEGATRON_ARGUMENTS: dict[str, str | None] = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--no-persist-layer-norm": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-bias-gelu-fusion": None,
    "--no-bias-swiglu-fusion": None,
    "--no-bias-dropout-fusion": None,
    "--no-rope-fusion": None,
}

_DEEP = "--use-deep-optimizer-states"
_active = False
_real_cuda = torch.cuda


class NotCoveredError(RuntimeError):
    """Something of a GPU was asked for that the CPU stand-in does not have."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is not covered by megatron_dos.cpu_emulation. Run this on a GPU, or choose Megatron arguments "
            "that do not need it."
        )


# ---- Host tensors and device tensors ([Note: two kinds of memory]) --------------------------------------------------

_MARK = "_megatron_dos_host_memory"  # attribute of a storage: "pageable" or "pinned"
_TENSOR_DEVICE = torch.Tensor.device  # torch's own, before activate() replaces them
_TENSOR_TYPE = torch.Tensor.type
_TENSOR_TO = torch.Tensor.to
_TENSOR_NUMPY = torch.Tensor.numpy
_TENSOR_ARRAY = torch.Tensor.__array__
_STAND_IN_DEVICE = torch.device("cpu", 0)
_no_dispatch = torch._C.DisableTorchFunctionSubclass


def _host_mark(tensor: torch.Tensor) -> str | None:
    """'pageable' or 'pinned' for a host tensor, None for any other."""
    with _no_dispatch():
        try:
            return getattr(tensor.untyped_storage(), _MARK, None)
        except (NotImplementedError, RuntimeError):  # sparse, and wrappers without a storage
            return None


def _on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in CPU memory and not, say, a meta or fake tensor."""
    with _no_dispatch():
        return _TENSOR_DEVICE.__get__(tensor).type == "cpu"


def _is_device(tensor: torch.Tensor) -> bool:
    return _on_cpu(tensor) and _host_mark(tensor) is None


def _as_host(tensor: torch.Tensor, mark: str = "pageable") -> torch.Tensor:
    """Mark freshly made memory as host memory and return it as a HostTensor."""
    if not _on_cpu(tensor):
        return tensor
    with _no_dispatch():
        setattr(tensor.untyped_storage(), _MARK, mark)
        return _as_host_type(tensor)


def _as_host_type(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor as a HostTensor, so that operations on it are seen. Parameters stay what they are."""
    if isinstance(tensor, (HostTensor, torch.nn.Parameter)):
        return tensor
    if tensor.is_leaf and tensor._base is None:  # as_subclass would make it a view, and no leaf
        return torch.Tensor._make_subclass(HostTensor, tensor, tensor.requires_grad)
    return tensor.as_subclass(HostTensor)


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, function) for item in value))
    if isinstance(value, tuple) or type(value) is list:  # tuples of torch.return_types among them
        return type(value)([_map_tensors(item, function) for item in value])
    if type(value) is dict:
        return {key: _map_tensors(item, function) for key, item in value.items()}
    return value


# Operations that a GPU allows on a host and a device tensor together.
_CROSSING = {
    torch.Tensor.copy_,
    torch.Tensor.data.__set__,
    torch.Tensor.set_,
    torch.Tensor.__setitem__,
    torch.Tensor.is_set_to,
    torch.Tensor.is_same_size,
    torch._has_compatible_shallow_copy_type,  # Module.cuda() and .cpu() ask it
}
# These take host indices into a device tensor, but not the other way round.
_INDEXING = {
    torch.Tensor.__getitem__,
    torch.Tensor.index_put,
    torch.Tensor.index_put_,
    torch.index_put,
    torch.index_put_,
}
# These ask the other tensor for its shape only.
_SHAPING = {torch.Tensor.view_as, torch.Tensor.expand_as, torch.Tensor.reshape_as}


def _may_mix(func: Callable, args: Any, host: list[torch.Tensor]) -> bool:
    """Whether a GPU would take these host tensors together with device tensors."""
    if func in _CROSSING:
        return True
    if func in _INDEXING:
        return not _host_mark(args[0])
    return all(tensor.dim() == 0 for tensor in host)


def _name_of(func: Callable) -> str:
    owner = getattr(func, "__self__", None)  # getters and setters are methods of their property
    return getattr(owner, "__name__", None) or getattr(func, "__qualname__", None) or repr(func)


class HostTensor(torch.Tensor):
    """A tensor in host memory. Only its Python type differs from a plain tensor's, and only under emulation."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with _no_dispatch():
            inputs = [tensor for tensor in _tensors_in((args, kwargs)) if _on_cpu(tensor)]
            if func in _SHAPING:
                inputs = inputs[:1]
            host = [tensor for tensor in inputs if _host_mark(tensor)]
            device = [tensor for tensor in inputs if not _host_mark(tensor)]
            if device and host and not _may_mix(func, args, host):
                raise RuntimeError(
                    f"{_name_of(func)}: Expected all tensors to be on the same device, but found host tensors of shape "
                    f"{[tuple(tensor.shape) for tensor in host]} together with device tensors of shape "
                    f"{[tuple(tensor.shape) for tensor in device]}. Copy one with .cpu(), .cuda() or copy_() first."
                )
            new_mark = None if device or not host else "pageable"
            result = func(*args, **kwargs)

            def place(tensor: torch.Tensor) -> torch.Tensor:
                if _host_mark(tensor):
                    return _as_host_type(tensor)
                if new_mark and not any(tensor is given for given in inputs):
                    return _as_host(tensor, new_mark)
                return tensor

            return _map_tensors(result, place)

    def __reduce_ex__(self, protocol: int) -> Any:
        # Files and messages must not name this class: a process without the emulation has to read them.
        with _no_dispatch():
            return self.detach().as_subclass(torch.Tensor).requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        # torch's own would make a plain tensor of it. Views of one storage become separate copies here.
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]


def _kind(device: Any) -> str | None:
    """'host' or 'device' for what may be given as `device=`; None where it is neither, or not given."""
    if device is None:
        return None
    if isinstance(device, int):  # torch.cuda.current_device() is an int, as on a GPU
        return "device"
    device = torch.device(device)
    if device.type == "cuda" or device == _STAND_IN_DEVICE:
        return "device"
    return "host" if device.type == "cpu" else None


def _kind_of(tensor: torch.Tensor) -> str | None:
    if not _on_cpu(tensor):
        return None
    return "host" if _host_mark(tensor) else "device"


def _factory(make: Callable, inherits: bool) -> Callable:
    """Wrap a function that makes tensors: GPU devices become the CPU, and the result is marked by its kind.

    inherits: without `device=` the result is where the first argument is, if that is a tensor; else it is on the host.
    """

    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("out") is not None:
            return make(*args, **kwargs)
        kind = _kind(kwargs.get("device"))
        if kwargs.get("device") is None:
            source = args[0] if args and inherits else None
            kind = _kind_of(source) if isinstance(source, torch.Tensor) else "host"
        elif kind:
            kwargs["device"] = "cpu"
        if kind == "host" and make.__name__ in _RANDOM_FACTORIES:  # [Note: two generators]
            kwargs["generator"] = kwargs.get("generator") or _host_generator
        pinned = kwargs.pop("pin_memory", False)  # page-locking needs a driver: the mark remembers the request
        if pinned and kind != "host":
            raise RuntimeError(f"{make.__name__}: only host tensors can be pinned, not device={kwargs.get('device')!r}")
        requires_grad = kwargs.pop("requires_grad", False)
        with _no_dispatch():
            result = make(*args, **kwargs)
        if kind == "host" and not any(result is arg for arg in args):
            result = _as_host(result, "pinned" if pinned else "pageable")
        return result.requires_grad_() if requires_grad else result

    return wrapper


# fmt: off
_HOST_FACTORIES = (
    "arange", "empty", "empty_strided", "eye", "frombuffer", "from_numpy", "full", "linspace", "logspace", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tril_indices", "triu_indices", "zeros",
)
_INHERITING_FACTORIES = (
    "as_tensor", "asarray", "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like",
    "tensor", "zeros_like",
)
_RANDOM_FACTORIES = ("rand", "randint", "randn", "randperm")
_RANDOM_METHODS = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
)
_NEW_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
# fmt: on


def _tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Tensor.to: a move between host and device is a copy, as on a GPU, and never an alias."""
    args = list(args)
    if "other" in kwargs:
        args.insert(0, kwargs.pop("other"))
    if args and isinstance(args[0], torch.Tensor):  # to(other): its place and its dtype
        args[:1] = [args[0].device, args[0].dtype]
    if args and isinstance(args[0], (str, int, torch.device)):
        kwargs["device"] = args.pop(0)
    mine, target = _kind_of(self), _kind(kwargs.get("device"))
    if target:
        kwargs["device"] = "cpu"
    if mine and target and mine != target:
        flags = [args.pop() for arg in args[:] if isinstance(arg, bool)]  # (..., non_blocking, copy) come last
        if flags:
            kwargs["non_blocking"] = flags[-1]
        kwargs["copy"] = True
    with _no_dispatch():
        # Without the device, dtype and flags keep their order: they are the positional arguments of to(dtype, ...).
        if "device" in kwargs and args and not isinstance(args[0], bool):
            kwargs["dtype"] = args.pop(0)
        if "device" in kwargs and args:
            kwargs.update(zip(("non_blocking", "copy"), args, strict=False))
            args = []
        result = _TENSOR_TO(self, *args, **kwargs)
        if result is self:
            return self
        if (target or mine) == "host":
            return _as_host(result)
        return result.as_subclass(torch.Tensor) if type(result) is HostTensor else result


def _tensor_cuda(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> torch.Tensor:
    if device is not None and _kind(device) != "device":
        raise RuntimeError(f"Invalid device for .cuda(): {device!r}, must be a cuda device")
    return self.to("cuda", non_blocking=non_blocking, memory_format=memory_format)


def _tensor_cpu(self: torch.Tensor, memory_format: Any = torch.preserve_format) -> torch.Tensor:
    return self.to("cpu", memory_format=memory_format)


def _tensor_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Tensor.type: Megatron compares its strings ('torch.cuda.BFloat16Tensor') to know where a parameter is."""
    if dtype is None:
        with _no_dispatch():
            name = _TENSOR_TYPE(self)
        return name.replace("torch.", "torch.cuda.", 1) if _is_device(self) else name
    if isinstance(dtype, torch.dtype):
        return self.to(dtype, non_blocking=non_blocking)
    name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    kind = "cuda" if name.startswith("torch.cuda.") else "cpu"
    return self.to(kind, _DTYPES[name.rpartition(".")[2]], non_blocking=non_blocking)


def _tensor_type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return self.to(other)


def _tensor_pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    mark = _host_mark(self)
    if mark is None:
        raise RuntimeError(f"cannot pin '{self.type()}': only dense CPU tensors can be pinned")
    if mark == "pinned":
        return self
    with _no_dispatch():
        return _as_host(self.detach().clone().as_subclass(torch.Tensor), "pinned")


def _tensor_is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return _host_mark(self) == "pinned"


def _tensor_numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    if _is_device(self) and not force:
        raise TypeError("can't convert a device tensor to numpy. Use Tensor.cpu() to copy it to host memory first.")
    with _no_dispatch():
        return _TENSOR_NUMPY(self, force=force)


def _tensor_array(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_device(self):
        raise TypeError("can't convert a device tensor to numpy. Use Tensor.cpu() to copy it to host memory first.")
    with _no_dispatch():
        return _TENSOR_ARRAY(self.as_subclass(torch.Tensor), *args, **kwargs)


def _tensor_device(self: torch.Tensor) -> torch.device:
    return _STAND_IN_DEVICE if _is_device(self) else _TENSOR_DEVICE.__get__(self)


def _tensor_get_device(self: torch.Tensor) -> int:
    return current_device() if _is_device(self) else -1


def _random_method(draw: Callable) -> Callable:
    """Wrap Tensor.normal_ and its like: host tensors draw from the host's generator ([Note: two generators])."""

    @functools.wraps(draw)
    def wrapper(self: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
        if generator is None and _host_mark(self):
            generator = _host_generator
        return draw(self, *args, generator=generator, **kwargs)

    return wrapper


def _tensor_record_stream(self: torch.Tensor, stream: Stream) -> None:
    _check_stream(stream, "record_stream")


_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class _TensorType(type):
    """Type of torch.cuda.FloatTensor and its like: isinstance() asks for kind and dtype, a call makes a tensor."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and _is_device(value) and value.dtype is _DTYPES[cls.__name__]

    def __call__(cls, *args: Any) -> torch.Tensor:
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            return torch.tensor(args[0], dtype=_DTYPES[cls.__name__], device="cuda")
        return torch.empty(*args, dtype=_DTYPES[cls.__name__], device="cuda")


# ---- Streams and events: work is done when the call returns, so ordering holds by itself ----------------------------


class Stream:
    """A stream that is always idle, since CPU work runs inline."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        if kwargs:
            raise NotCoveredError(f"torch.cuda.Stream({', '.join(kwargs)}=...)")
        self.device = _STAND_IN_DEVICE
        self.device_index = _device_index(device)
        self.priority = priority
        self.cuda_stream = 0
        self._previous: list[Stream] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def wait_stream(self, stream: Stream) -> None:
        _check_stream(stream, "wait_stream")

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, Event):
            raise TypeError(f"wait_event needs a torch.cuda.Event, not {type(event).__name__}")

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Stream:
        self._previous.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *exc: object) -> None:
        set_stream(self._previous.pop())


class Event:
    """An event that is complete as soon as it is recorded."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        if interprocess or external:
            raise NotCoveredError("torch.cuda.Event(interprocess=True or external=True)")
        self.enable_timing = enable_timing
        self._recorded: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        _check_stream(stream or current_stream(), "record")
        self._recorded = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        _check_stream(stream or current_stream(), "wait")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between the two records."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("elapsed_time needs two events made with enable_timing=True")
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (end_event._recorded - self._recorded) * 1e3


def _check_stream(stream: object, where: str) -> None:
    if not isinstance(stream, Stream):
        raise TypeError(f"{where} needs a torch.cuda.Stream, not {type(stream).__name__}")


class _State:
    device = 0
    default_stream: Stream | None = None
    stream: Stream | None = None


def default_stream(device: Any = None) -> Stream:
    if _State.default_stream is None:
        _State.default_stream = Stream()
    return _State.default_stream


def current_stream(device: Any = None) -> Stream:
    return _State.stream or default_stream()


def set_stream(stream: Stream) -> None:
    _check_stream(stream, "set_stream")
    _State.stream = stream


class StreamContext:
    """torch.cuda.stream(...). As the real one, it can be entered again: Megatron keeps one for two collectives."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exc)


# ---- Devices, memory figures ----------------------------------------------------------------------------------------


def device_count() -> int:
    """One device for each rank of this machine, as on a real node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def current_device() -> int:
    return _State.device


def set_device(device: Any) -> None:
    index = _device_index(device)
    if not 0 <= index < device_count():
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}: there are {device_count()} stand-in devices")
    _State.device = index


def _device_index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if _kind(device) != "device":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return current_device() if device.type == "cpu" or device.index is None else device.index


class device_context:
    """torch.cuda.device(...): the current device inside a `with`; a negative index changes nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = _device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        if self.idx >= 0:
            set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        set_device(self.prev_idx)


class device_of_context(device_context):
    """torch.cuda.device_of(tensor)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if isinstance(tensor, torch.Tensor) else -1)


def _host_memory() -> tuple[int, int]:
    """(available, total) bytes of this machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=_device_name(),
        major=8,
        minor=0,
        total_memory=_host_memory()[1],
        multi_processor_count=os.cpu_count() or 1,
        is_integrated=1,
        warp_size=32,
    )


def _device_name(device: Any = None) -> str:
    return "CPU standing in for a GPU"


def _memory_stats(device: Any = None) -> dict[str, int]:
    """No GPU memory is in use, which is what the figures say. Only figures that Megatron logs are listed."""
    keys = [f"{kind}_bytes.all" for kind in ("allocated", "reserved", "active", "inactive_split", "requested")]
    keys += ["allocation.all", "segment.all", "active.all"]
    stats = {f"{key}.{part}": 0 for key in keys for part in ("current", "peak", "allocated", "freed")}
    return {**stats, "num_alloc_retries": 0, "num_ooms": 0, "num_device_alloc": 0, "num_device_free": 0}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """For calls whose effect a CPU has anyway: synchronize, empty_cache, nvtx marks."""


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


# ---- Random numbers ([Note: two generators]) ------------------------------------------------------------------------

_REAL_GENERATOR = torch.Generator
_host_generator = torch.Generator()


class _GeneratorType(type):
    """torch.Generator that takes a GPU device too; isinstance() still knows torch's own."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _REAL_GENERATOR("cpu" if _kind(device) else device)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _REAL_GENERATOR)

    def __getattr__(cls, name: str) -> Any:  # torch.Generator.get_state and so on
        return getattr(_REAL_GENERATOR, name)


class Generator(metaclass=_GeneratorType):
    pass


class _DefaultGenerators(Sequence):
    """torch.cuda.default_generators: one generator for each device, all the same one here."""

    def __getitem__(self, device: Any) -> torch.Generator:
        _device_index(device)
        return torch.default_generator

    def __len__(self) -> int:
        return device_count()


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return _as_host(torch.default_generator.get_state())


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    with _no_dispatch():
        torch.default_generator.set_state(new_state.as_subclass(torch.Tensor))


def _seed() -> None:
    torch.default_generator.seed()


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _replace_host_random() -> None:
    """torch.manual_seed and its like: they mean the host's generator, or both."""
    seed_all, manual_seed_all = torch.seed, torch.manual_seed

    def get_rng_state() -> torch.Tensor:
        return _as_host(_host_generator.get_state())

    def set_rng_state(new_state: torch.Tensor) -> None:
        with _no_dispatch():
            _host_generator.set_state(new_state.as_subclass(torch.Tensor))

    def manual_seed(seed: int) -> torch.Generator:
        _host_generator.manual_seed(int(seed))
        return manual_seed_all(seed)

    def seed() -> int:
        value = seed_all()
        _host_generator.manual_seed(value)
        return value

    for function in (get_rng_state, set_rng_state, manual_seed, seed):
        setattr(torch, function.__name__, function)
        setattr(torch.random, function.__name__, function)


# ---- torch.cuda -----------------------------------------------------------------------------------------------------


class _StandInModule(types.ModuleType):
    """A module that knows what it covers, and says so when asked for anything else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and introspection probe these
            raise AttributeError(name)
        raise NotCoveredError(f"{self.__name__}.{name}")


def _refused(name: str) -> type:
    """A class that may be named, in an annotation or isinstance(), but not made."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise NotCoveredError(f"torch.cuda.{name}")

    return type(name, (), {"__init__": refuse})


def _module(name: str, contents: dict[str, Any]) -> types.ModuleType:
    module = _StandInModule(name, "CPU stand-in, see megatron_dos.cpu_emulation")
    module.__dict__.update(contents)
    # Lets `import torch.cuda.x` of rarely used parts reach torch's own files.
    module.__path__ = getattr(sys.modules.get(name), "__path__", [])
    return module


def _build_cuda() -> types.ModuleType:
    """The module that takes the place of torch.cuda, with its submodules."""
    random = {
        "get_rng_state": _get_rng_state,
        "get_rng_state_all": lambda: [_get_rng_state() for _ in range(device_count())],
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": lambda states: _set_rng_state(states[current_device()]),
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "seed": _seed,
        "seed_all": _seed,
        "initial_seed": lambda: torch.default_generator.initial_seed(),
    }
    memory = {
        name: _constant(0)
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "device_memory_used",
        )
    }
    memory |= {
        "memory_stats": _memory_stats,
        "mem_get_info": lambda device=None: _host_memory(),
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "reset_max_memory_allocated": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "MemPool": _refused("MemPool"),
        "CUDAPluggableAllocator": _refused("CUDAPluggableAllocator"),
    }
    nvtx = {
        "range_push": _constant(0),
        "range_pop": _constant(0),
        "range_start": _constant(0),
        "range_end": _nothing,
        "mark": _nothing,
        "range": _constant(contextlib.nullcontext()),
    }
    devices = {
        "is_available": _constant(True),
        "is_initialized": _constant(True),
        "is_bf16_supported": _constant(True),
        "is_current_stream_capturing": _constant(False),
        "device_count": device_count,
        "current_device": current_device,
        "set_device": set_device,
        "device": device_context,
        "device_of": device_of_context,
        "get_device_properties": _device_properties,
        "get_device_capability": _constant((8, 0)),
        "get_device_name": _device_name,
        "synchronize": _nothing,
        "ipc_collect": _nothing,
        "init": _nothing,
        # torch itself and Megatron's random state tracker call these.
        "_lazy_init": _nothing,
        "_lazy_call": lambda call, **kwargs: call(),
        "_is_in_bad_fork": _constant(False),
        "_is_compiled": _constant(True),
        "_get_device_index": lambda device, optional=False, allow_cpu=False: _device_index(device),
        "default_generators": _DefaultGenerators(),
    }
    streams = {
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "ExternalStream": _refused("ExternalStream"),
        "CUDAGraph": _refused("CUDAGraph"),
        "graph": _refused("graph"),
    }
    submodules = {
        "random": _module("torch.cuda.random", random),
        "memory": _module("torch.cuda.memory", memory),
        "nvtx": _module("torch.cuda.nvtx", nvtx),
        "amp": _real_cuda.amp,  # plain Python around torch.amp, which works on a CPU
    }
    if importlib.util.find_spec("torch.cuda._pin_memory_utils"):
        # torch.distributed.checkpoint imports it; its functions ask for torch.cuda.cudart, which is refused.
        submodules["_pin_memory_utils"] = importlib.import_module("torch.cuda._pin_memory_utils")
    sys.modules.update({f"torch.cuda.{name}": module for name, module in submodules.items()})
    tensor_types = {name: _TensorType(name, (), {"__module__": "torch.cuda"}) for name in _DTYPES}
    errors = {"OutOfMemoryError": _real_cuda.OutOfMemoryError}
    return _module("torch.cuda", {**random, **memory, **devices, **streams, **submodules, **tensor_types, **errors})


# ---- Putting it in place --------------------------------------------------------------------------------------------


def is_active() -> bool:
    """Whether the stand-in is in place in this process."""
    return _active


def _real_gpu_present() -> bool:
    return _real_cuda.is_available()


def activate(force: bool = False) -> None:
    """Put the CPU stand-in in the place of torch.cuda in this process, for good. A second call does nothing.

    force: go on although a GPU is present (also: MEGATRON_DOS_FORCE_CPU_EMULATION=1). Raises RuntimeError otherwise.
    Call it before anything of Megatron is imported.
    """
    global _active
    if _active:
        return
    if not (force or os.environ.get(FORCE_VARIABLE) == "1") and _real_gpu_present():
        raise RuntimeError(
            "a GPU is present: megatron_dos.cpu_emulation is for machines without one. Run the script directly, or "
            f"emulate anyway with --force or {FORCE_VARIABLE}=1."
        )
    if any(name == "megatron.core" or name.startswith("megatron.core.") for name in sys.modules):
        raise RuntimeError("megatron.core was imported before megatron_dos.cpu_emulation.activate(): call it earlier")
    _active = True

    # Megatron insists on it with tensor parallelism on GPUs of this capability; it has no effect on a CPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _disable_compile()
    sys.modules["torch.cuda"] = torch.cuda = _build_cuda()
    torch.Generator = Generator
    _replace_host_random()
    _replace_accelerator()
    _replace_tensor_methods()
    _replace_parameter_methods()
    _replace_data_loading()
    _replace_coalesced_gather()


def _disable_compile() -> None:
    """Megatron compiles functions as it is imported, which would initialise CUDA; eager code gives the same results."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # torch.optim imports it sooner or later, and it looks into the real torch.cuda as it is imported.
    dynamo = importlib.import_module("torch._dynamo")
    dynamo.config.disable = True  # where it was imported before, it has not seen the variable

    def not_compiled(model: Callable | None = None, **options: Any) -> Callable:
        return model if model is not None else lambda function: function

    torch.compile = not_compiled


def _replace_accelerator() -> None:
    """torch.accelerator is torch's newer name for the same device."""
    replacements = {
        "is_available": _constant(True),
        "device_count": device_count,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": current_device,
        "current_device_idx": current_device,
        "set_device_index": set_device,
        "set_device_idx": set_device,
        "current_stream": current_stream,
        "set_stream": set_stream,
        "synchronize": _nothing,
        "empty_cache": _nothing,
    }
    module = getattr(torch, "accelerator", None)  # from torch 2.6 on
    for name, replacement in replacements.items():
        if hasattr(module, name):
            setattr(module, name, replacement)


def _replace_tensor_methods() -> None:
    for name in _HOST_FACTORIES + _INHERITING_FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name), name in _INHERITING_FACTORIES))
    for name in _NEW_METHODS:
        setattr(torch.Tensor, name, _factory(getattr(torch.Tensor, name), inherits=True))
    for name in _RANDOM_METHODS:
        setattr(torch.Tensor, name, _random_method(getattr(torch.Tensor, name)))
    torch.Tensor.is_cuda = property(_is_device)
    torch.Tensor.is_cpu = property(lambda self: _kind_of(self) == "host")
    torch.Tensor.device = property(_tensor_device)
    torch.Tensor.get_device = _tensor_get_device
    torch.Tensor.to = _tensor_to
    torch.Tensor.cuda = _tensor_cuda
    torch.Tensor.cpu = _tensor_cpu
    torch.Tensor.type = _tensor_type
    torch.Tensor.type_as = _tensor_type_as
    torch.Tensor.pin_memory = _tensor_pin_memory
    torch.Tensor.is_pinned = _tensor_is_pinned
    torch.Tensor.numpy = _tensor_numpy
    torch.Tensor.__array__ = _tensor_array
    torch.Tensor.record_stream = _tensor_record_stream


def _replace_parameter_methods() -> None:
    """A Parameter over host memory is a plain Parameter: Module.cuda() later gives the same object device memory.

    What is taken out of it is a HostTensor again; arithmetic on the Parameter itself is not seen, and counts as a
    device's, since torch asks no __torch_function__ of Parameters.
    """
    parameter = torch.nn.Parameter
    make = parameter.__new__

    def new(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> torch.nn.Parameter:
        if isinstance(data, HostTensor):
            with _no_dispatch():
                data = data.detach().as_subclass(torch.Tensor)
        return make(cls, data, requires_grad)

    def taking_out(method: Callable) -> Callable:
        @functools.wraps(method)
        def wrapper(self: torch.nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = method(self, *args, **kwargs)
            return _as_host(result, _host_mark(result) or "pageable") if _host_mark(self) else result

        return wrapper

    parameter.__new__ = new
    for name in ("clone", "contiguous", "detach", "double", "float", "half", "bfloat16"):
        setattr(parameter, name, taking_out(getattr(torch.Tensor, name)))
    data = torch.Tensor.data
    parameter.data = property(taking_out(lambda self: data.__get__(self)), data.__set__)


def _replace_data_loading() -> None:
    """DataLoader and torch.load: their tensors are host tensors; nothing is page-locked."""
    from multiprocessing.reduction import ForkingPickler

    from torch.multiprocessing import reductions
    from torch.utils.data import DataLoader
    from torch.utils.data import dataloader as loader_module

    make_loader = DataLoader.__init__

    @functools.wraps(make_loader)
    def loader(self: DataLoader, *args: Any, **kwargs: Any) -> None:
        make_loader(self, *args, **kwargs)
        self.pin_memory = False
        if self.generator is None:  # [Note: two generators]
            self.generator = _host_generator
            if getattr(self.sampler, "generator", self) is None:
                self.sampler.generator = _host_generator

    DataLoader.__init__ = loader

    next_batch = loader_module._BaseDataLoaderIter.__next__

    def host_batch(self: Any) -> Any:  # worker processes send plain tensors
        return _map_tensors(next_batch(self), lambda tensor: tensor if _host_mark(tensor) else _as_host(tensor))

    loader_module._BaseDataLoaderIter.__next__ = host_batch

    def send_plain(tensor: HostTensor) -> Any:
        with _no_dispatch():
            return reductions.reduce_tensor(tensor.as_subclass(torch.Tensor))

    ForkingPickler.register(HostTensor, send_plain)

    def restore(storage: Any, location: str) -> Any:
        if location != "cpu" and not location.startswith("cuda"):
            return None
        if location == "cpu":
            setattr(getattr(storage, "_untyped_storage", storage), _MARK, "pageable")
        return storage

    # Before torch's own entries (10 and up). Saved tensors carry 'cpu' as their place, whatever their kind.
    torch.serialization.register_package(5, lambda storage: None, restore)


class _Works:
    """What waits for several collectives."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _replace_coalesced_gather() -> None:
    """All-gathers that Megatron coalesces are done one by one.

    gloo's coalesced all-gather frees memory twice, now and then, when it is under way beside an all-reduce of any
    group: the heap breaks, and malloc ends the process (seen with torch 2.14.1 in a program that does nothing else,
    within some hundred rounds; pytorch/pytorch issues 65231 and 65237 tell of crashes in torch's own test of it).
    """
    if not torch.distributed.is_available():
        return
    group_type = torch.distributed.ProcessGroup

    def one_by_one(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any) -> _Works:
        pairs = zip(outputs, inputs, strict=True)
        return _Works([group._allgather_base(gathered, own, options) for gathered, own in pairs])

    for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):  # the second from torch 2.14 on
        if hasattr(group_type, name):
            setattr(group_type, name, one_by_one)


# ---- Megatron -------------------------------------------------------------------------------------------------------


def adapt_megatron() -> None:
    """Change the few places of Megatron itself that need more than torch.cuda. Imports megatron.core."""
    if not _active:
        raise RuntimeError("call megatron_dos.cpu_emulation.activate() before adapt_megatron()")
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.transformer import dot_product_attention, torch_norm

    if dataset_utils.compile_helpers is _compile_dataset_helpers:
        return
    dataset_utils.compile_helpers = _compile_dataset_helpers
    _allow_sequence_parallel_norm(torch_norm.WrappedTorchNorm)
    _allow_context_parallel_attention(dot_product_attention.DotProductAttention)
    _fork_checkpoint_writers(PersistentAsyncCaller)


def _fork_checkpoint_writers(caller: type) -> None:
    """Megatron's persistent writer of asynchronous saves is forked: a fresh process would have no stand-in, and fail
    while the training waits for it."""
    get_process = caller._get_process.__func__

    def forked(cls: type, rank: int, mp_mode: str = "fork", *args: Any, **kwargs: Any) -> Any:
        return get_process(cls, rank, "fork", *args, **kwargs)

    caller._get_process = classmethod(forked)


def _compile_dataset_helpers() -> None:
    """Build Megatron's C++ dataset helpers for this interpreter, if they are not there.

    Pip's package ships them compiled but without the Makefile, at which Megatron exits. In a checkout the Makefile asks
    whatever `python3` is on PATH for the include folders and the file name; this interpreter may be another one.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return
    from megatron.core import datasets

    includes = {_pybind11_headers(), *(sysconfig.get_path(name) for name in ("include", "platinclude"))}
    folder = os.path.dirname(os.path.abspath(datasets.__file__))
    command = [
        "make",
        f"--directory={folder}",
        f"CPPFLAGS={' '.join(f'-I{include}' for include in sorted(includes))}",
        f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
    ]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"cpu_emulation: cannot build Megatron's dataset helpers in {folder}: make and a C++ compiler needed")
    importlib.invalidate_caches()


def _pybind11_headers() -> str:
    """The folder of pybind11's headers: the package's, or torch's, which carries them for its own extensions."""
    if importlib.util.find_spec("pybind11") is None:
        return os.path.join(os.path.dirname(torch.__file__), "include")
    import pybind11

    return pybind11.get_include()


def _allow_sequence_parallel_norm(norm: type) -> None:
    """torch's norms refuse sequence parallelism only because nobody tells Megatron to reduce their grads: tell it."""
    make_norm = norm.__new__

    def make(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return make_norm(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        module = make_norm(cls, plain, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = True
        return module

    norm.__new__ = make


class _GatherSequence(torch.autograd.Function):
    """[local sequence, ...] of every context-parallel rank -> [sequence, ...] in natural order.

    Rank r of n holds chunks r and 2n-1-r of 2n, which balances causal attention.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        size = group.size()
        parts = [torch.empty_like(local) for _ in range(size)]
        torch.distributed.all_gather(parts, local.contiguous(), group=group)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        rank, size = ctx.group.rank(), ctx.group.size()
        chunks = grad.chunk(2 * size)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]), None


def _allow_context_parallel_attention(attention: type) -> None:
    """Local attention under context parallelism: own queries against the keys and values of the whole sequence."""
    make_attention, attend = attention.__init__, attention.forward

    @functools.wraps(make_attention)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain = copy.copy(config)
        plain.context_parallel_size = 1
        make_attention(self, plain, *args, **kwargs)
        self.config = config

    @functools.wraps(attend)
    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.context_parallel_size > 1:
            from megatron.core import parallel_state

            if attention_mask is None:
                raise NotCoveredError("context parallelism without an attention mask from the data loader")
            group = parallel_state.get_context_parallel_group()
            key, value = _GatherSequence.apply(key, group), _GatherSequence.apply(value, group)
        return attend(self, query, key, value, attention_mask, *args, **kwargs)

    attention.__init__ = init
    attention.forward = forward


# ---- Command line ---------------------------------------------------------------------------------------------------


def missing_arguments(given: Sequence[str]) -> list[str]:
    """The arguments of MEGATRON_ARGUMENTS that are not among `given`, as a list to append."""
    names = {argument.split("=", 1)[0] for argument in given}
    added: list[str] = []
    for name, value in MEGATRON_ARGUMENTS.items():
        if name not in names:
            added += [name] if value is None else [name, value]
    return added


def _be_the_only_rank() -> None:
    """Set what a launcher would have set, for a process that was started without one."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    # The rank finds itself: any free port will do, and no host name needs to resolve.
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: run a Megatron script under the stand-in."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_dos.cpu_emulation",
        description="Run a Megatron training script on a machine without a GPU: gloo in the place of NCCL, the CPU in "
        "the place of the GPU. For demos and tests, not for training.",
    )
    parser.add_argument("--force", action="store_true", help="go on although a GPU is present")
    parser.add_argument(
        "--as-given", action="store_true", help="do not add the arguments that Megatron needs on a CPU where absent"
    )
    parser.add_argument("script", help="the Megatron script, such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script}")

    if _DEEP in options.arguments and importlib.util.find_spec("megatron_dos._cpp_adam") is None:
        folder = os.path.dirname(os.path.abspath(__file__))
        sys.exit(
            f"cpu_emulation: {_DEEP} needs the C++ module, which is not built in {folder}. Start from a folder outside "
            "the checkout, where Python finds the installed package, or build the checkout: make setup"
        )
    _be_the_only_rank()
    try:
        activate(force=options.force)
    except RuntimeError as error:
        sys.exit(f"cpu_emulation: {error}")
    # What `python SCRIPT` would have: the script's folder, not the current one, holds its imports.
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))
    arguments = list(options.arguments)
    if not options.as_given:
        added = missing_arguments(arguments)
        if added and int(os.environ.get("RANK", "0")) == 0:
            print(f"cpu_emulation: added the arguments {' '.join(added)}", flush=True)
        arguments += added
    try:
        importlib.import_module("megatron.core")
    except ImportError as error:
        sys.exit(f"cpu_emulation: {options.script} needs megatron.core, which cannot be imported: {error}")
    adapt_megatron()
    sys.argv = [options.script, *arguments]
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    # Under `python -m` this file is __main__; the one true copy is the module that others could import.
    importlib.import_module("megatron_dos.cpu_emulation").main()
