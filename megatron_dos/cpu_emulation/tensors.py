# SPDX-License-Identifier: Apache-2.0
"""Replacements for tensor factories and for methods of Tensor and Parameter: they keep host and device memory apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dos.cpu_emulation.devices import current_device
from megatron_dos.cpu_emulation.host_tensors import (
    STAND_IN_DEVICE,
    TENSOR_DEVICE,
    HostTensor,
    as_host,
    device_kind,
    host_mark,
    is_device,
    no_dispatch,
    tensor_kind,
)
from megatron_dos.cpu_emulation.random import host_generator
from megatron_dos.cpu_emulation.streams import Stream, check_stream

_TENSOR_TYPE = torch.Tensor.type  # torch's own, before activate() replaces them
_TENSOR_TO = torch.Tensor.to
_TENSOR_NUMPY = torch.Tensor.numpy
_TENSOR_ARRAY = torch.Tensor.__array__


def _factory(make: Callable[..., Any], inherits: bool) -> Callable[..., Any]:
    """Wrap a function that makes tensors: GPU devices become the CPU, and the result is marked by its kind.

    inherits: without `device=` the result is where the first argument is, if that is a tensor; else it is on the host.
    """

    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("out") is not None:
            return make(*args, **kwargs)
        kind = device_kind(kwargs.get("device"))
        if kwargs.get("device") is None:
            source = args[0] if args and inherits else None
            kind = tensor_kind(source) if isinstance(source, torch.Tensor) else "host"
        elif kind:
            kwargs["device"] = "cpu"
        if kind == "host" and make.__name__ in _RANDOM_FACTORIES:  # [Note: two generators]
            kwargs["generator"] = kwargs.get("generator") or host_generator
        pinned = kwargs.pop("pin_memory", False)  # page-locking needs a driver: the mark remembers the request
        if pinned and kind != "host":
            raise RuntimeError(f"{make.__name__}: only host tensors can be pinned, not device={kwargs.get('device')!r}")
        requires_grad = kwargs.pop("requires_grad", False)
        with no_dispatch():
            result = make(*args, **kwargs)
        if kind == "host" and not any(result is arg for arg in args):
            result = as_host(result, "pinned" if pinned else "pageable")
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


def _tensor_to(self: torch.Tensor, *given: Any, **kwargs: Any) -> torch.Tensor:
    """Tensor.to: a move between host and device is a copy, as on a GPU, and never an alias."""
    args = list(given)
    if "other" in kwargs:
        args.insert(0, kwargs.pop("other"))
    if args and isinstance(args[0], torch.Tensor):  # to(other): its place and its dtype
        args[:1] = [args[0].device, args[0].dtype]
    if args and isinstance(args[0], (str, int, torch.device)):
        kwargs["device"] = args.pop(0)
    mine, target = tensor_kind(self), device_kind(kwargs.get("device"))
    if target:
        kwargs["device"] = "cpu"
    if mine and target and mine != target:
        flags = [args.pop() for arg in args[:] if isinstance(arg, bool)]  # (..., non_blocking, copy) come last
        if flags:
            kwargs["non_blocking"] = flags[-1]
        kwargs["copy"] = True
    with no_dispatch():
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
            return as_host(result)
        return result.as_subclass(torch.Tensor) if type(result) is HostTensor else result


def _tensor_cuda(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> torch.Tensor:
    if device is not None and device_kind(device) != "device":
        raise RuntimeError(f"Invalid device for .cuda(): {device!r}, must be a cuda device")
    return self.to("cuda", non_blocking=non_blocking, memory_format=memory_format)


def _tensor_cpu(self: torch.Tensor, memory_format: Any = torch.preserve_format) -> torch.Tensor:
    return self.to("cpu", memory_format=memory_format)


def _tensor_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Tensor.type: Megatron compares its strings ('torch.cuda.BFloat16Tensor') to know where a parameter is."""
    if dtype is None:
        with no_dispatch():
            name = _TENSOR_TYPE(self)
        return name.replace("torch.", "torch.cuda.", 1) if is_device(self) else name
    if isinstance(dtype, torch.dtype):
        return self.to(dtype, non_blocking=non_blocking)
    name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    kind = "cuda" if name.startswith("torch.cuda.") else "cpu"
    return self.to(kind, DTYPES[name.rpartition(".")[2]], non_blocking=non_blocking)


def _tensor_type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return self.to(other)


def _tensor_pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    mark = host_mark(self)
    if mark is None:
        raise RuntimeError(f"cannot pin '{self.type()}': only dense CPU tensors can be pinned")
    if mark == "pinned":
        return self
    with no_dispatch():
        return as_host(self.detach().clone().as_subclass(torch.Tensor), "pinned")


def _tensor_is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return host_mark(self) == "pinned"


def _tensor_numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    if is_device(self) and not force:
        raise TypeError("can't convert a device tensor to numpy. Use Tensor.cpu() to copy it to host memory first.")
    with no_dispatch():
        return _TENSOR_NUMPY(self, force=force)


def _tensor_array(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if is_device(self):
        raise TypeError("can't convert a device tensor to numpy. Use Tensor.cpu() to copy it to host memory first.")
    with no_dispatch():
        return _TENSOR_ARRAY(self.as_subclass(torch.Tensor), *args, **kwargs)


def _tensor_device(self: torch.Tensor) -> torch.device:
    return STAND_IN_DEVICE if is_device(self) else TENSOR_DEVICE.__get__(self)


def _tensor_get_device(self: torch.Tensor) -> int:
    return current_device() if is_device(self) else -1


def _random_method(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Tensor.normal_ and its like: host tensors draw from the host's generator ([Note: two generators])."""

    @functools.wraps(draw)
    def wrapper(self: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
        if generator is None and host_mark(self):
            generator = host_generator
        return draw(self, *args, generator=generator, **kwargs)

    return wrapper


def _tensor_record_stream(self: torch.Tensor, stream: Stream) -> None:
    check_stream(stream, "record_stream")


DTYPES = {
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


class TensorType(type):
    """Type of torch.cuda.FloatTensor and its like: isinstance() asks for kind and dtype, a call makes a tensor."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and is_device(value) and value.dtype is DTYPES[cls.__name__]

    def __call__(cls, *args: Any) -> torch.Tensor:
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            return torch.tensor(args[0], dtype=DTYPES[cls.__name__], device="cuda")
        return torch.empty(*args, dtype=DTYPES[cls.__name__], device="cuda")


def replace_tensor_methods() -> None:
    for name in _HOST_FACTORIES + _INHERITING_FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name), name in _INHERITING_FACTORIES))
    for name in _NEW_METHODS:
        setattr(torch.Tensor, name, _factory(getattr(torch.Tensor, name), inherits=True))
    for name in _RANDOM_METHODS:
        setattr(torch.Tensor, name, _random_method(getattr(torch.Tensor, name)))
    torch.Tensor.is_cuda = property(is_device)
    torch.Tensor.is_cpu = property(lambda self: tensor_kind(self) == "host")
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


def replace_parameter_methods() -> None:
    """A Parameter over host memory is a plain Parameter: Module.cuda() later gives the same object device memory.

    What is taken out of it is a HostTensor again; arithmetic on the Parameter itself is not seen, and counts as a
    device's, since torch asks no __torch_function__ of Parameters.
    """
    parameter = torch.nn.Parameter
    make = parameter.__new__

    def new(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> torch.nn.Parameter:
        if isinstance(data, HostTensor):
            with no_dispatch():
                data = data.detach().as_subclass(torch.Tensor)
        return make(cls, data, requires_grad)

    def taking_out(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: torch.nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = method(self, *args, **kwargs)
            return as_host(result, host_mark(result) or "pageable") if host_mark(self) else result

        return wrapper

    parameter.__new__ = new
    for name in ("clone", "contiguous", "detach", "double", "float", "half", "bfloat16"):
        setattr(parameter, name, taking_out(getattr(torch.Tensor, name)))
    data = torch.Tensor.data
    parameter.data = property(taking_out(lambda self: data.__get__(self)), data.__set__)
