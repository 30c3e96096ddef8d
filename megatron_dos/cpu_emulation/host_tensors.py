# SPDX-License-Identifier: Apache-2.0
"""Host tensors and device tensors: which a tensor is, and which operations may not mix them.

[Note: two kinds of memory] All tensors live in host memory here, but the code under test must still be able to tell a
device tensor from a host tensor, and must be caught when it mixes them. Where memory belongs is a property of the
storage, so host storages carry a mark, and every tensor without it counts as a device tensor: the many results of
autograd then need no attention. Marked storages come from factories without a device or with device='cpu', from
.cpu(), pin_memory(), numpy and torch.load. Views share the storage, hence the mark. For operations that make new memory
host tensors are instances of HostTensor, whose __torch_function__ marks the results, and refuses an operation on a
host and a device tensor as a GPU would. `tensor.device` is torch.device('cpu') for host tensors and
torch.device('cpu', 0) for device tensors: `.type` is 'cpu' for both, since a CPU kernel may touch both, yet
`device=other.device` keeps the kind, and the two never compare equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

MARK = "_megatron_dos_host_memory"  # attribute of a storage: "pageable" or "pinned"
TENSOR_DEVICE = torch.Tensor.device  # torch's own, before activate() replaces it
STAND_IN_DEVICE = torch.device("cpu", 0)
no_dispatch = torch._C.DisableTorchFunctionSubclass


def host_mark(tensor: torch.Tensor) -> str | None:
    """'pageable' or 'pinned' for a host tensor, None for any other."""
    with no_dispatch():
        try:
            return getattr(tensor.untyped_storage(), MARK, None)
        except (NotImplementedError, RuntimeError):  # sparse, and wrappers without a storage
            return None


def _on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in CPU memory and not, say, a meta or fake tensor."""
    with no_dispatch():
        return TENSOR_DEVICE.__get__(tensor).type == "cpu"


def is_device(tensor: torch.Tensor) -> bool:
    return _on_cpu(tensor) and host_mark(tensor) is None


def as_host(tensor: torch.Tensor, mark: str = "pageable") -> torch.Tensor:
    """Mark freshly made memory as host memory and return it as a HostTensor."""
    if not _on_cpu(tensor):
        return tensor
    with no_dispatch():
        setattr(tensor.untyped_storage(), MARK, mark)
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


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, tuple) or type(value) is list:  # tuples of torch.return_types among them
        return type(value)([map_tensors(item, function) for item in value])
    if type(value) is dict:
        return {key: map_tensors(item, function) for key, item in value.items()}
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


def _may_mix(func: Callable[..., Any], args: Any, host: list[torch.Tensor]) -> bool:
    """Whether a GPU would take these host tensors together with device tensors."""
    if func in _CROSSING:
        return True
    if func in _INDEXING:
        return not host_mark(args[0])
    return all(tensor.dim() == 0 for tensor in host)


def _name_of(func: Callable[..., Any]) -> str:
    owner = getattr(func, "__self__", None)  # getters and setters are methods of their property
    return getattr(owner, "__name__", None) or getattr(func, "__qualname__", None) or repr(func)


class HostTensor(torch.Tensor):
    """A tensor in host memory. Only its Python type differs from a plain tensor's, and only under emulation."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with no_dispatch():
            inputs = [tensor for tensor in _tensors_in((args, kwargs)) if _on_cpu(tensor)]
            if func in _SHAPING:
                inputs = inputs[:1]
            host = [tensor for tensor in inputs if host_mark(tensor)]
            device = [tensor for tensor in inputs if not host_mark(tensor)]
            if device and host and not _may_mix(func, args, host):
                raise RuntimeError(
                    f"{_name_of(func)}: Expected all tensors to be on the same device, but found host tensors of shape "
                    f"{[tuple(tensor.shape) for tensor in host]} together with device tensors of shape "
                    f"{[tuple(tensor.shape) for tensor in device]}. Copy one with .cpu(), .cuda() or copy_() first."
                )
            new_mark = None if device or not host else "pageable"
            result = func(*args, **kwargs)

            def place(tensor: torch.Tensor) -> torch.Tensor:
                if host_mark(tensor):
                    return _as_host_type(tensor)
                if new_mark and not any(tensor is given for given in inputs):
                    return as_host(tensor, new_mark)
                return tensor

            return map_tensors(result, place)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Files and messages must not name this class: a process without the emulation has to read them.
        with no_dispatch():
            return self.detach().as_subclass(torch.Tensor).requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        # torch's own would make a plain tensor of it. Views of one storage become separate copies here.
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]


def device_kind(device: Any) -> str | None:
    """'host' or 'device' for what may be given as `device=`; None where it is neither, or not given."""
    if device is None:
        return None
    if isinstance(device, int):  # torch.cuda.current_device() is an int, as on a GPU
        return "device"
    device = torch.device(device)
    if device.type == "cuda" or device == STAND_IN_DEVICE:
        return "device"
    return "host" if device.type == "cpu" else None


def tensor_kind(tensor: torch.Tensor) -> str | None:
    if not _on_cpu(tensor):
        return None
    return "host" if host_mark(tensor) else "device"
