# SPDX-License-Identifier: Apache-2.0
"""The cuda path's operations on fake CUDA tensors: every operand is where it should be, and a wrong one is caught.

torch's FakeTensorMode knows shapes, dtypes and devices and computes nothing, so params, grads and slots can be "on a
GPU" that does not exist. `Watch` sees every tensor operation of every handler and checks it against what the handler's
kind may do and against the memory that the schedule says it reads and writes. Streams and events need a driver: they
are the stand-ins of test_cuda_device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_cuda_device import Machine
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dos.device import CudaDevice, HostDevice
from megatron_dos.device import cuda as cuda_device
from megatron_dos.kernels import AdamScalars, device_kernel, elementwise_adam, library_adam
from megatron_dos.node import slab
from megatron_dos.program.partition import OwnedRange, partition
from megatron_dos.program.schedule import OpKind, Stream
from megatron_dos.update import operations
from megatron_dos.update.engine import EngineOptions, UpdateEngine
from megatron_dos.update.operations import StepInputs, StepOperations

CUDA = torch.device("cuda", 0)
NUMELS = (40, 100, 64, 1, 300)
BUCKETS = {(0, 0): (0, 1), (0, 1): (2, 3, 4)}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXED = (FP32, BF16, FP16, BF16, FP32)
DTYPES = {"fp32": (FP32,) * 5, "bf16": (BF16,) * 5, "fp16": (FP16,) * 5, "mixed": MIXED}

# kind -> (device type of the target, of the source) of its copies; no other operation runs in it
COPIES = {
    OpKind.EARLY_GRAD_TO_HOST: ("cpu", "cuda"),
    OpKind.CAST_GRAD: ("cuda", "cuda"),
    OpKind.GRAD_TO_HOST: ("cpu", "cuda"),
    OpKind.PARAM_TO_DEVICE: ("cuda", "cpu"),
    OpKind.STATES_TO_DEVICE: ("cuda", "cpu"),
    OpKind.STATES_TO_HOST: ("cpu", "cuda"),
    OpKind.UPDATE_ON_HOST: None,
    OpKind.RELEASE_BUCKET: None,
}


class WrongOperandError(AssertionError):
    """An operation used memory of the wrong device, or that the schedule does not know of."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise WrongOperandError(message)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Watch(TorchDispatchMode):
    """Checks every tensor operation while `op` is set."""

    def __init__(self, engine: UpdateEngine, inputs: StepInputs) -> None:
        super().__init__()
        self.engine, self.inputs = engine, inputs
        self.op: Any = None
        self.seen: dict[OpKind, int] = dict.fromkeys(OpKind, 0)
        self.memory: Any = None

    @contextmanager
    def during(self, op: Any) -> Iterator[None]:
        self.op = op
        try:
            yield
        finally:
            self.op = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.op is not None and not func.is_view and func.namespace == "aten":
            self._check(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func, args, kwargs) -> None:
        kind = self.op.kind
        if kind is OpKind.UPDATE_ON_DEVICE:
            self._check_devices_of_update(func, args, kwargs)
            return
        require(COPIES[kind] is not None, f"{kind.value}: runs {func}")
        require(func is torch.ops.aten.copy_.default, f"{kind.value}: runs {func}, which is no copy")
        target, source = args[0], args[1]
        found = (target.device.type, source.device.type)
        require(found == COPIES[kind], f"{kind.value}: copies to {found[0]} from {found[1]}")
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        require(not blocking, f"{kind.value}: a copy that blocks the host")
        if found != ("cuda", "cuda"):
            # torch would make a temporary for it, and wait for that.
            require(target.dtype == source.dtype, f"{kind.value}: copies {source.dtype} as {target.dtype}")
            require(target.is_contiguous() and source.is_contiguous(), f"{kind.value}: copies with strides")
        self._touch(reads=[source], writes=[target])

    def _check_devices_of_update(self, func, args, kwargs) -> None:
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        for tensor in flat:
            if isinstance(tensor, torch.Tensor):
                require(tensor.device.type == "cuda", f"update_on_device: {func} on {tensor.device}")

    def kernel(self, kernel):
        """A device kernel that checks its operands first."""

        def checked(param, exp_avg, exp_avg_sq, grad, scalars, unscale=1.0, grad_scale=1.0, out=None):
            for tensor in (param, exp_avg, exp_avg_sq, grad, out):
                require(isinstance(tensor, FakeTensor), "the device kernel got no fake tensor")
                require(tensor.device.type == "cuda", f"the device kernel got a tensor on {tensor.device}")
            for state in (param, exp_avg, exp_avg_sq):
                require(state.dtype == FP32, f"the device kernel got a state in {state.dtype}")
            states = [param, exp_avg, exp_avg_sq]
            self._touch(reads=[*states, grad], writes=[*states, out])
            kernel(param, exp_avg, exp_avg_sq, grad, scalars, unscale, grad_scale, out)

        return checked

    def submit(self, pieces, threads):
        """Stands in for cpu.submit."""
        for param, exp_avg, exp_avg_sq, grad, scalars, unscale, grad_scale, out in pieces:
            states = [param, exp_avg, exp_avg_sq]
            for tensor in (*states, grad, out):
                require(tensor.device.type == "cpu", f"the host update got a tensor on {tensor.device}")
                require(tensor.shape == param.shape and tensor.dim() == 1, "the host update got another shape")
                require(tensor.is_contiguous(), "the host update got strides")
            require(all(state.dtype == FP32 for state in states), "the host update got a state that is not FP32")
            require(isinstance(scalars, AdamScalars), "the host update got no scalars")
            require(isinstance(unscale, float) and isinstance(grad_scale, float), "a factor is no host number")
            self._touch(reads=[*states, grad], writes=[*states, out])
        return Ticket()

    def _touch(self, reads, writes) -> None:
        """The memory must be what the schedule declares; only whole storages are told apart."""
        self.seen[self.op.kind] += 1
        declared_writes = self._storages(self.op.writes)
        declared = declared_writes | self._storages(self.op.reads)
        for tensor in writes:
            require(storage(tensor) in declared_writes, f"{self.op.kind.value}: writes what it does not declare")
        for tensor in reads:
            require(storage(tensor) in declared, f"{self.op.kind.value}: reads what it does not declare")

    def _storages(self, resources) -> set[int]:
        """Storages of the resources' memory."""
        found = set()
        for name, index in resources:
            if name in ("grad", "param"):
                tensors = self.inputs.grads if name == "grad" else self.engine.memory.shards
                found |= {storage(tensors[p.owner]) for p in self.engine.partition.subgroups[index].pieces}
            elif name == "states":
                states = self.engine.memory.states
                found |= {storage(states.master), storage(states.exp_avg), storage(states.exp_avg_sq)}
                resident = self.engine.memory.resident
                found |= {storage(resident.master), storage(resident.exp_avg), storage(resident.exp_avg_sq)}
            else:
                found |= {storage(tensor) for tensor in self.memory((name, index))}
        return found


class Ticket:
    def wait(self) -> None:
        pass

    def poll(self) -> bool:
        return True


@pytest.fixture
def fake(monkeypatch):
    """Fake tensors, fake slabs, and streams that need no driver."""
    made = Machine(0)
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(cuda_device.torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(slab, "zeros", lambda numel, dtype=FP32: torch.zeros(numel, dtype=dtype, device="cpu"))
    with FakeTensorMode():
        yield made


def make_engine(param_dtypes, kernel=None, **options) -> UpdateEngine:
    ranges, start = [], 0
    for bucket, owners in BUCKETS.items():
        for owner in owners:
            ranges.append(OwnedRange(owner, bucket, start, NUMELS[owner]))
            start += NUMELS[owner]
    params = [torch.empty(n, dtype=d, device=CUDA) for n, d in zip(NUMELS, param_dtypes, strict=True)]
    options = EngineOptions(threads=1, **options)
    return UpdateEngine(partition(ranges, 64), params, options, CudaDevice(CUDA), kernel or nothing, changing=(1, 3))


def nothing(*operands) -> None:
    """A device kernel; its operands are checked before it is called."""


def step(monkeypatch, engine: UpdateEngine, grad_dtypes, handler=None) -> Watch:
    """One step under watch. `handler` may exchange handlers: (StepOperations, kind, handler) -> handler."""
    grads = [torch.empty(n, dtype=d, device=CUDA) for n, d in zip(NUMELS, grad_dtypes, strict=True)]
    scalars = AdamScalars.at_step(1, 1e-3, (0.9, 0.99), 1e-8, 0.1, decoupled=True)
    released = []
    inputs = StepInputs(grads, [scalars] * len(NUMELS), {0: (0.5, 0.25)}, released.append)
    watch = Watch(engine, inputs)
    monkeypatch.setattr(engine, "device_kernel", watch.kernel(engine.device_kernel))
    monkeypatch.setattr(operations.cpu_kernel, "submit", watch.submit)

    def watched(bound, kind):
        given = getattr(bound, kind.value)
        if handler is not None:
            given = handler(bound, kind, given)

        def handle(op):
            expected = engine._device._streams.get(op.stream)
            if op.stream is not Stream.CPU and expected is not None:
                assert cuda_device.torch.cuda.current_stream() is expected
            with watch.during(op):
                return given(op)

        return handle

    def handlers(self):
        watch.memory = self.memory
        return {kind: watched(self, kind) for kind in OpKind}

    def begin(op, given):
        def handle(op):
            assert cuda_device.torch.cuda.current_stream() is engine._device._streams[op.stream]
            with watch.during(op):
                given(op)

        begin_on_device(op, handle)

    begin_on_device = engine._device.begin
    monkeypatch.setattr(engine._device, "begin", begin)
    monkeypatch.setattr(StepOperations, "handlers", handlers)
    watch.memory = lambda resource: [engine.memory.early_grads[resource[1]]]
    with watch:
        engine.send_early(engine.memory.buckets, grads.__getitem__)
        engine.update(inputs)
    assert released == list(BUCKETS)
    return watch


KINDS_OF_SHARE = {
    0: {OpKind.STATES_TO_DEVICE, OpKind.UPDATE_ON_DEVICE, OpKind.STATES_TO_HOST},
    1: {OpKind.GRAD_TO_HOST, OpKind.UPDATE_ON_HOST, OpKind.PARAM_TO_DEVICE},
}


@pytest.mark.parametrize("grads_as_fp32", [True, False], ids=["sent-as-fp32", "sent-as-they-are"])
@pytest.mark.parametrize("grads", DTYPES)
@pytest.mark.parametrize("params", DTYPES)
def test_every_operation_works_on_the_memory_and_device_it_should(monkeypatch, fake, params, grads, grads_as_fp32):
    for share in (0, 0.5, 1):
        engine = make_engine(DTYPES[params], host_share=share, grads_as_fp32=grads_as_fp32)
        seen = {kind for kind, count in step(monkeypatch, engine, DTYPES[grads]).seen.items() if count}
        expected = KINDS_OF_SHARE.get(share, KINDS_OF_SHARE[0] | KINDS_OF_SHARE[1])
        if share and grads_as_fp32 and grads != "fp32":
            expected = expected | {OpKind.CAST_GRAD}
        assert seen == expected


@pytest.mark.parametrize("grads", DTYPES)
def test_grads_that_are_sent_early(monkeypatch, fake, grads):
    for share, slots in ((1, 3), (1, 100), (0.5, 100)):
        engine = make_engine(MIXED, host_share=share, early_slots=slots)
        seen = step(monkeypatch, engine, DTYPES[grads]).seen
        assert seen[OpKind.EARLY_GRAD_TO_HOST] >= len(engine._program.early) > 0
        assert seen[OpKind.GRAD_TO_HOST]  # those of shards that change, again


def test_resident_states_stay_on_the_device(monkeypatch, fake):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    engine = make_engine(MIXED, KERNELS["elementwise"](), host_share=1, resident_share=0.4)
    assert engine.memory.resident.master.device.type == "cuda"
    seen = step(monkeypatch, engine, MIXED).seen
    assert seen[OpKind.UPDATE_ON_DEVICE]
    assert not seen[OpKind.STATES_TO_DEVICE]
    assert not seen[OpKind.STATES_TO_HOST]


KERNELS = {
    "triton": lambda: pytest.importorskip("megatron_dos.kernels.triton_adam").adamw,
    "elementwise": lambda: elementwise_adam.adamw,
    "auto": lambda: device_kernel.select("auto", CUDA),
    "torch": lambda: library_adam.load("torch"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_device_kernel_keeps_to_the_device(monkeypatch, fake, name):
    engine = make_engine(MIXED, KERNELS[name](), host_share=0.3)
    assert step(monkeypatch, engine, MIXED).seen[OpKind.UPDATE_ON_DEVICE]


@pytest.mark.parametrize("options", [{"stride": 2}, {"host_slots": 1, "device_slots": 1}, {"host_slots": 9}], ids=str)
def test_other_strides_and_slots(monkeypatch, fake, options):
    step(monkeypatch, make_engine(MIXED, **{"host_share": 0.5, **options}), MIXED)


def test_the_inline_device_uses_the_same_memory(monkeypatch, fake):
    engine = make_engine(MIXED, host_share=0.5)
    engine._device = HostDevice()
    engine._device._streams = {}
    step(monkeypatch, engine, MIXED)


# --- the check finds what it is meant to find


def without_async(copy_kind):
    def fault(bound, kind, given):
        def blocking(op):
            original = torch.Tensor.copy_
            torch.Tensor.copy_ = lambda self, source, non_blocking=False: original(self, source)
            try:
                return given(op)
            finally:
                torch.Tensor.copy_ = original

        return blocking if kind is copy_kind else given

    return fault


def turned_round(copy_kind):
    """The copy goes from the target to the source."""

    def fault(bound, kind, given):
        def reverse(op):
            original = torch.Tensor.copy_
            torch.Tensor.copy_ = lambda self, source, non_blocking=False: original(source, self, non_blocking)
            try:
                return given(op)
            finally:
                torch.Tensor.copy_ = original

        return reverse if kind is copy_kind else given

    return fault


def device_slots_on_the_host(bound, kind, given):
    bound._states_slots = [torch.empty(slot.shape, device="cpu") for slot in bound._states_slots]
    return given


def grad_slots_on_the_host(bound, kind, given):
    bound._grad_slots = [torch.empty(slot.shape, device="cpu") for slot in bound._grad_slots]
    return given


def host_grads_on_the_device(bound, kind, given):
    memory = bound._memory
    if memory.host_grads[0].device.type == "cpu":
        memory.host_grads = [torch.empty(slot.shape, dtype=torch.uint8, device=CUDA) for slot in memory.host_grads]
    return given


def host_params_on_the_device(bound, kind, given):
    memory = bound._memory
    if memory.host_params[0].device.type == "cpu":
        memory.host_params = [torch.empty(slot.shape, dtype=torch.uint8, device=CUDA) for slot in memory.host_params]
    return given


def states_on_the_device(bound, kind, given):
    states = bound._memory.states
    if states.exp_avg.device.type == "cpu":
        states.exp_avg = torch.empty(states.numel, device=CUDA)
    return given


def device_update_of_the_host_grad(bound, kind, given):
    def update(op):
        bound._grad = lambda piece: operations._typed(bound._memory.host_grads[0], 0, piece.numel, FP32)
        try:
            return given(op)
        finally:
            del bound._grad

    return update if kind is OpKind.UPDATE_ON_DEVICE else given


def device_update_of_the_host_states(bound, kind, given):
    def update(op):
        numel = bound._states_slots[op.slot].shape[1]
        states = bound._memory.states
        slots, bound._states_slots = bound._states_slots, [[states.master[:numel]] * 3] * len(bound._states_slots)
        try:
            return given(op)
        finally:
            bound._states_slots = slots

    return update if kind is OpKind.UPDATE_ON_DEVICE else given


def host_update_of_the_device_grad(bound, kind, given):
    def update(op):
        original = operations._typed
        operations._typed = lambda slot, at, numel, dtype: original(
            torch.empty_like(slot, device=CUDA), at, numel, dtype
        )
        try:
            return given(op)
        finally:
            operations._typed = original

    return update if kind is OpKind.UPDATE_ON_HOST else given


def another_slot(bound, kind, given):
    """The right device, but memory that the schedule knows nothing of."""

    def handle(op):
        return given(replace(op, slot=1 - op.slot))

    return handle if kind is OpKind.GRAD_TO_HOST else given


def a_cast_on_the_way(bound, kind, given):
    def handle(op):
        for at, piece in bound._placed(op, bound._runs.of_grads(op.subgroup)):
            target = operations._typed(bound._memory.host_grads[op.slot], 4 * at, piece.numel, FP32)
            target.copy_(bound._grad(piece), non_blocking=True)

    return handle if kind is OpKind.GRAD_TO_HOST else given


def work_in_a_release(bound, kind, given):
    def handle(op):
        bound._memory.shards[0].add_(1)
        return given(op)

    return handle if kind is OpKind.RELEASE_BUCKET else given


CROSSING = (OpKind.GRAD_TO_HOST, OpKind.PARAM_TO_DEVICE, OpKind.STATES_TO_DEVICE, OpKind.STATES_TO_HOST)
FAULTS = {
    **{f"blocking {kind.value}": without_async(kind) for kind in (*CROSSING, OpKind.CAST_GRAD)},
    **{f"reversed {kind.value}": turned_round(kind) for kind in (*CROSSING, OpKind.CAST_GRAD)},
    **{
        fault.__name__: fault
        for fault in (
            device_slots_on_the_host,
            grad_slots_on_the_host,
            host_grads_on_the_device,
            host_params_on_the_device,
            states_on_the_device,
            device_update_of_the_host_grad,
            device_update_of_the_host_states,
            host_update_of_the_device_grad,
            another_slot,
            a_cast_on_the_way,
            work_in_a_release,
        )
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_operand_is_caught(monkeypatch, fake, fault):
    grads_as_fp32 = fault != "a_cast_on_the_way"
    engine = make_engine(DTYPES["bf16"], host_share=0.5, grads_as_fp32=grads_as_fp32)
    with pytest.raises(WrongOperandError):
        step(monkeypatch, engine, DTYPES["bf16"], handler=FAULTS[fault])
