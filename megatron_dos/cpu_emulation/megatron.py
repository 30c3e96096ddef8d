# SPDX-License-Identifier: Apache-2.0
"""Changes to Megatron itself, in the few places that need more than torch.cuda."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from typing import Any

import torch

from megatron_dos.cpu_emulation.base import NotCoveredError, is_active


def adapt_megatron() -> None:
    """Change the few places of Megatron itself that need more than torch.cuda. Imports megatron.core."""
    if not is_active():
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
