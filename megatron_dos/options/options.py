# SPDX-License-Identifier: Apache-2.0
"""The options of this optimizer: one frozen dataclass, from which flags, defaults, checks and help are made."""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass, field
from typing import Any

from megatron_dos.refusal import Refusal

__all__ = ["AUTOMATIC_EARLY_SLOTS", "DosOptions", "UnsupportedOptionError", "flag_of", "own_options", "parse_steps"]


AUTOMATIC_EARLY_SLOTS = 4
"""Host slots for grads that are sent in the backward pass, where --dos-early-grad-slots is 0."""


class UnsupportedOptionError(ValueError, Refusal):
    """An option that deep optimizer states cannot honour; the message names the flags and a remedy."""


@dataclass(frozen=True, kw_only=True)
class DosOptions:
    """What a user may choose about deep optimizer states.

    Raises:
        UnsupportedOptionError: a value of the wrong type, or outside the limits of its field.
    """

    use_deep_optimizer_states: bool = False
    """Keep the Adam states of the distributed optimizer (FP32 master parameters and both moments) in host memory
    and update them subgroup by subgroup. Needs --use-distributed-optimizer."""

    dos_subgroup_size: int = field(default=0, metadata={"metavar": "PARAMETERS", "maximum": 2**40})
    """Parameters per subgroup of the deep optimizer states. 0 chooses the size automatically."""

    dos_cpu_threads: int = field(default=0, metadata={"metavar": "THREADS", "maximum": 2**16})
    """Number of threads that update this rank's subgroups on the CPU. 0 takes this rank's share of its allowed cores:
    the cores of its affinity mask, divided among the ranks that share them and capped by CPU quotas."""

    dos_gpu_share: float = field(default=-1.0, metadata={"metavar": "SHARE"})
    """Share of the parameters, 0 to 1, whose states are streamed through the GPU and updated there; the CPU updates
    the others at the same time. Parameters with states resident in GPU memory do not count. The result is the same to
    the bit for every share. -1 (automatic) is 0 without a GPU. Otherwise the first steps use the share suggested by
    `megatron-dos calibrate`, or half if it has not been run, and the share is then adjusted from their timings."""

    dos_update_stride: int = field(default=0, metadata={"metavar": "K", "maximum": 2**20})
    """Update one subgroup in K on the GPU, as in the published system, instead of a share. 0 is off."""

    dos_gpu_kernel: str = field(default="auto", metadata={"choices": ("auto", "triton", "te", "apex", "torch")})
    """Kernel of the updates on the GPU: triton, or auto, which works without Triton if that is missing; both give the
    bits of the CPU kernel. te (Transformer Engine), apex and torch round in their own way."""

    dos_grad_transfer: str = field(default="fp32", metadata={"choices": ("fp32", "model")})
    """How gradients go to the CPU: fp32 converts them on the GPU, model sends them in their own dtype and converts
    them inside the CPU update. The result is the same to the bit."""

    dos_resident_share: float = field(default=0.0, metadata={"metavar": "SHARE", "automatic": False})
    """Share of the parameters, 0 to 1, whose states stay in GPU memory, 12 bytes for each, instead of host memory. The
    GPU updates them without any copies. The result is the same to the bit for every share."""

    dos_overlap_grad_d2h: str = field(default="auto", metadata={"choices": ("auto", "on", "off")})
    """Send gradients to the CPU in the backward pass, each bucket as soon as it is reduced. As usual, the norm, the
    check for infinities and clipping come before any update. The result is the same to the bit, except for the last
    bits of a norm that Transformer Engine or Apex computes. Needs --overlap-grad-reduce; with that flag and a GPU,
    auto is on, but not with CUDA_DEVICE_MAX_CONNECTIONS=1, TORCH_NCCL_BLOCKING_WAIT=1 or --log-num-zeros-in-grad.
    Gradients that a training loop edits in place before the step are sent again. Torch does not count writes through
    .data, NumPy, raw pointers, collectives or CUDA graphs: call
    torch.autograd.graph.increment_version(param.main_grad) after such a write, or choose off."""

    dos_early_grad_slots: int = field(default=0, metadata={"metavar": "SUBGROUPS", "maximum": 2**16})
    """Number of subgroups whose gradients may be sent in the backward pass: each takes host memory of at most 4 bytes
    for each parameter of the largest subgroup. 0 chooses the number automatically."""

    dos_trace_dir: str = field(default="", metadata={"metavar": "FOLDER"})
    """Folder for traces of some optimizer steps, one file for each rank and step. They show when each operation ran;
    Perfetto (ui.perfetto.dev) and chrome://tracing open them."""

    dos_trace_steps: str = field(default="5-7", metadata={"metavar": "STEPS"})
    """Optimizer steps to trace, such as 5-7 or 3,10,20-22. The optimizer's own count applies: skipped steps have no
    number. Only with --dos-trace-dir."""

    async_save: bool = field(default=False, metadata={"of_megatron": True})
    """Megatron's --async-save. The optimizer needs to know it: while the states are written, they have to fit into the
    shared memory of the node once more."""

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            _check_value(option, getattr(self, option.name))
        if self.dos_update_stride and self.dos_gpu_share >= 0:
            raise UnsupportedOptionError(
                f"--dos-update-stride {self.dos_update_stride} and --dos-gpu-share {self.dos_gpu_share} both say what "
                "the GPU updates. Drop one of them."
            )
        if self.dos_early_grad_slots and self.dos_overlap_grad_d2h == "off":
            raise UnsupportedOptionError(
                f"--dos-early-grad-slots {self.dos_early_grad_slots} has no effect with --dos-overlap-grad-d2h off. "
                "Drop one of them."
            )
        parse_steps(self.dos_trace_steps)
        if self.dos_trace_steps != type(self).dos_trace_steps and not self.dos_trace_dir:
            raise UnsupportedOptionError(
                f"--dos-trace-steps {self.dos_trace_steps} has no effect without --dos-trace-dir. "
                "Add that, or drop the former."
            )

    @classmethod
    def from_args(cls, args: Any) -> DosOptions:
        """Read the options from Megatron's parsed arguments; an absent attribute means its default."""
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)})

    @classmethod
    def from_config(cls, config: Any) -> DosOptions:
        """Read the options from an OptimizerConfig, whose fields have the same names."""
        return cls.from_args(config)

    @classmethod
    def types(cls) -> dict[str, type]:
        """The type of each option, by field name, in order of declaration."""
        return typing.get_type_hints(cls)


def _check_value(option: dataclasses.Field[Any], value: Any) -> None:
    flag, kind = flag_of(option.name), DosOptions.types()[option.name]
    number: Any = value
    # bool is a subclass of int, and True is no number of threads.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise UnsupportedOptionError(f"{flag} takes {_NAMES[kind]}, not {value!r}.")
    choices = option.metadata.get("choices")
    if choices is not None and value not in choices:
        raise UnsupportedOptionError(f"{flag} {value} is not known: give one of {', '.join(choices)}.")
    automatic = option.metadata.get("automatic", True)
    if kind is float and not (0 <= number <= 1 or (automatic and value == -1)):
        allowed = "-1 (automatic) or a number from 0 to 1" if automatic else "a number from 0 to 1"
        raise UnsupportedOptionError(f"{flag} {value} is out of range: give {allowed}.")
    maximum = option.metadata.get("maximum")
    if maximum is not None and not 0 <= number <= maximum:
        raise UnsupportedOptionError(f"{flag} {value} is out of range: give 0 (automatic) or 1 to {maximum}.")


_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "a name"}


def parse_steps(text: str) -> tuple[range, ...]:
    """The steps that --dos-trace-steps names, from 1: "5-7" or "3,10,20-22".

    Raises:
        UnsupportedOptionError: the text names no steps.
    """
    steps = []
    for part in text.split(","):
        bounds = re.fullmatch(r"([0-9]{1,15})(?:-([0-9]{1,15}))?", part.strip())
        if bounds is None:
            raise UnsupportedOptionError(f"--dos-trace-steps {text!r} names no steps: give some like 5-7 or 3,10.")
        low, high = int(bounds[1]), int(bounds[2] or bounds[1])
        if not 1 <= low <= high:
            raise UnsupportedOptionError(f"--dos-trace-steps {text!r}: steps count from 1, and {part} has none.")
        steps.append(range(low, high + 1))
    return tuple(steps)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def own_options() -> list[dataclasses.Field[Any]]:
    """The fields that are flags of this package; the others hold flags that Megatron has already."""
    return [option for option in dataclasses.fields(DosOptions) if not option.metadata.get("of_megatron")]
