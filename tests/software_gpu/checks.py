# SPDX-License-Identifier: Apache-2.0
"""What runs on the software GPU, each check in a process of its own (server.py). What it returns is sent as JSON."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_dos import device as devices
from megatron_dos.gpu_check import engine as stage
from megatron_dos.program.schedule import OpKind
from megatron_dos.update.engine import EngineOptions
from software_gpu import gates
from software_gpu.kernels import replace_triton

CHECKS: dict[str, Callable[..., Any]] = {}


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    CHECKS[function.__name__] = function
    return function


def count(library: ctypes.CDLL, name: str) -> int:
    library.software_gpu_count.restype = ctypes.c_uint64
    return library.software_gpu_count(name.encode())


def fail(library: ctypes.CDLL, call: str, skipped: int = 0) -> None:
    library.software_gpu_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    library.software_gpu_fail(call.encode(), skipped)


@check
def torch_believes(library: ctypes.CDLL) -> Any:
    host = torch.ones(8).pin_memory()
    return {
        "available": torch.cuda.is_available(),
        "name": torch.cuda.get_device_name(0),
        "pinned": [host.is_pinned(), torch.ones(8).is_pinned()],
        "memory": torch.cuda.mem_get_info()[1],
    }


@check
def training(library: ctypes.CDLL) -> Any:
    """A small network trains on it as on the CPU, in FP32, and random numbers can be repeated."""
    def losses(device: str) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        layers = [torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)]
        model = torch.nn.Sequential(*layers)
        for param in model.parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.3)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(5):
            inputs = torch.randn(8, 16, generator=generator).to(device)
            loss = model(inputs).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def drawn() -> list[float]:
        torch.cuda.manual_seed(5)
        return torch.randn(4, device="cuda").tolist()

    return {"cpu": losses("cpu"), "cuda": losses("cuda"), "drawn": [drawn(), drawn()]}


def _copies_behind(waits: bool, rounds: int = 60) -> int:
    """Copies to the host on another stream than the one that writes: how often the host got other values."""
    other, host = torch.cuda.Stream(), torch.empty(1 << 16).pin_memory()
    wrong = 0
    for number in range(rounds):
        written = torch.full((1 << 16,), float(number), device="cuda")
        if waits:
            other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            host.copy_(written, non_blocking=True)
        other.synchronize()
        wrong += not bool((host == number).all())
        torch.cuda.synchronize()
    return wrong


@check
def missing_waits(library: ctypes.CDLL) -> Any:
    return {"with": _copies_behind(True), "without": _copies_behind(False)}


@check
def events(library: ctypes.CDLL) -> Any:
    """Events have a state per record: who waits, waits for the record that there was at the call."""
    event, early, late = torch.cuda.Event(enable_timing=True), torch.cuda.Stream(), torch.cuda.Stream()
    unrecorded = torch.cuda.Event()
    late.wait_event(unrecorded)  # nothing to wait for
    with torch.cuda.stream(early):
        torch.cuda._sleep(20_000_000)  # 20 ms
        event.record()
    late.wait_event(event)
    with torch.cuda.stream(early):
        torch.cuda._sleep(3_000_000_000)  # longer than a busy machine keeps the host from looking
        event.record()  # again: the wait above is not for this one
    end = torch.cuda.Event(enable_timing=True)
    end.record(late)
    end.synchronize()
    second_is_running = not event.query()
    event.synchronize()
    return {"first only": second_is_running, "milliseconds between": end.elapsed_time(event)}


@check
def pageable_copies(library: ctypes.CDLL) -> Any:
    names = [f"copies {way} {kind} memory" for way in ("from", "to") for kind in ("pinned", "pageable")]
    target, counts = torch.empty(1000, device="cuda"), []
    for host in (torch.ones(1000).pin_memory(), torch.ones(1000)):
        before = [count(library, name) for name in names]
        target.copy_(host, non_blocking=True)
        host.copy_(target, non_blocking=True)
        torch.cuda.synchronize()
        counts.append([count(library, name) - earlier for name, earlier in zip(names, before, strict=True)])
    return counts


@check
def host_touch(library: ctypes.CDLL) -> Any:
    return ctypes.c_float.from_address(torch.ones(8, device="cuda").data_ptr()).value


@check
def failures(library: ctypes.CDLL) -> Any:
    """Calls that are to fail do, once, with torch's error."""
    found = {}
    host = torch.empty(1 << 20)
    fail(library, "cudaHostRegister")
    found["register"] = [int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)) for _ in range(2)]
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    found["pending"] = library.cudaGetLastError()  # torch's next kernel launch would raise it
    source, target = torch.ones(64).pin_memory(), torch.empty(64, device="cuda")
    fail(library, "cudaMemcpyAsync")
    try:
        target.copy_(source, non_blocking=True)
        found["copy"] = ""
    except RuntimeError as error:
        found["copy"] = str(error).splitlines()[0]
    fail(library, "cudaMalloc")
    try:
        torch.empty(1 << 26, device="cuda")
        found["malloc"] = "taken after a second try"
    except torch.OutOfMemoryError:
        found["malloc"] = "out of memory"
    return found


def _pending(library: ctypes.CDLL) -> str:
    """What the next launch of a kernel raises; the one after that has to be well."""
    raised = ""
    try:
        torch.ones(4, device="cuda").add_(1)
    except RuntimeError as error:
        raised = str(error)
    torch.ones(4, device="cuda").add_(1)
    return raised


@check
def registering(library: ctypes.CDLL) -> Any:
    """Memory of the host is page-locked once, as a whole, and what fails leaves an error behind."""
    cudart, host = torch.cuda.cudart(), torch.empty(1 << 12, dtype=torch.uint8)
    start = host.data_ptr()
    torch.ones(4, device="cuda")
    found = {}
    calls = {
        "anew": lambda: cudart.cudaHostRegister(start, 2048, 0),
        "again": lambda: cudart.cudaHostRegister(start, 2048, 0),
        "a part": lambda: cudart.cudaHostRegister(start + 1024, 2048, 0),
        "what lies behind": lambda: cudart.cudaHostRegister(start + 2048, 2048, 0),
        "undo": lambda: cudart.cudaHostUnregister(start),
        "undo again": lambda: cudart.cudaHostUnregister(start),
        "undo in the middle": lambda: cudart.cudaHostUnregister(start + 3000),
        "undo the last": lambda: cudart.cudaHostUnregister(start + 2048),
    }
    for name, call in calls.items():
        found[name] = [int(call()), _pending(library)]
    return found, library.software_gpu_pinned_ranges()


@check
def slabs(library: ctypes.CDLL) -> Any:
    """A slab that cannot be page-locked is an error with a way out, and nothing is left behind of it."""
    from megatron_dos.node import slab

    torch.ones(4, device="cuda")
    fail(library, "cudaHostRegister")
    try:
        slab.zeros(1000)
        raised = ""
    except RuntimeError as error:
        raised = str(error)
    pending = _pending(library)
    made = slab.zeros(1000)
    pinned = made.is_pinned()
    ranges = library.software_gpu_pinned_ranges()
    child = os.fork()
    if child == 0:
        before = count(library, "cudaHostUnregister"), library.cudaGetLastError()
        del made
        after = count(library, "cudaHostUnregister"), library.cudaGetLastError()
        os._exit(int(before != after))
    in_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    del made
    left = ranges - library.software_gpu_pinned_ranges()
    return {"raised": raised, "pending": pending, "pinned": pinned, "released": left, "in a child": in_child}


@check
def legacy_stream(library: ctypes.CDLL) -> Any:
    """Who waits for whom: the default stream and one that blocks for each other, one that does not block for nobody."""
    torch.ones(4, device="cuda")
    handle = ctypes.c_void_p()
    assert library.cudaStreamCreateWithFlags(ctypes.byref(handle), 0) == 0
    blocking = torch.cuda.ExternalStream(handle.value)
    assert library.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
    streams = {
        "default": torch.cuda.default_stream(),
        "blocking": blocking,
        "non-blocking": torch.cuda.ExternalStream(handle.value),
        "torch's": torch.cuda.Stream(),
    }
    found = {}
    for before, held in streams.items():
        for after, other in streams.items():
            if held is not other:
                gate = gates.Gate(held)
                gates.enqueue(lambda: None, other)
                gates.settle(other)
                found[f"{after} after {before}"] = not other.query()
                gate.open()
                torch.cuda.synchronize()
    return sorted(pair for pair, waits in found.items() if waits)


@check
def use_after_free(library: ctypes.CDLL) -> Any:
    """Freed memory is refused where the driver has it, and spoilt where the caching allocator has it."""
    address, host = ctypes.c_void_p(), torch.ones(64).pin_memory()
    library.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.cudaFree.argtypes = [ctypes.c_void_p]
    arguments = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    library.cudaMemcpyAsync.argtypes = arguments
    library.cudaMalloc(ctypes.byref(address), 256)
    copy = [address, host.data_ptr(), 256, 1, None]
    found: dict[str, Any] = {"copies": [library.cudaMemcpyAsync(*copy)]}
    found["past the end"] = library.cudaMemcpyAsync(address.value + 4, *copy[1:])
    found["frees"] = [library.cudaFree(address), library.cudaFree(address)]
    found["copies"].append(library.cudaMemcpyAsync(*copy))
    library.cudaGetLastError()
    for recorded in (False, True):
        other = torch.cuda.Stream()
        used = gates.new(1)
        place = used.data_ptr()
        with torch.cuda.stream(other):
            gate = gates.Gate()
            host.copy_(used, non_blocking=True)
        if recorded:
            used.record_stream(other)
        del used
        again = torch.empty(64, device="cuda")
        gates.settle(torch.cuda.current_stream())
        gate.open()
        torch.cuda.synchronize()
        found["recorded" if recorded else "not recorded"] = [again.data_ptr() == place, bool((host == 1).all())]
    return found


@check
def stale_memory(library: ctypes.CDLL) -> Any:
    """A result that is read too early is NaN, though the memory held the right one from the round before."""
    other, host, right = torch.cuda.Stream(), torch.empty(64).pin_memory(), []
    for number in range(4):
        gate = gates.Gate() if number else None
        made = torch.full((64,), 7.0, device="cuda")
        torch.cuda.synchronize() if gate is None else None
        with torch.cuda.stream(other):
            host.copy_(made, non_blocking=True)
        other.synchronize()
        right.append(bool((host == 7).all()))
        if gate is not None:
            gate.open()
        torch.cuda.synchronize()
        del made
    return right


@check
def ipc(library: ctypes.CDLL) -> Any:
    """Handles for other processes are refused."""
    from torch.multiprocessing.reductions import reduce_tensor

    found = []
    for share in (
        lambda: reduce_tensor(torch.ones(4, device="cuda")),
        lambda: torch.cuda.Event(interprocess=True).ipc_handle(),
    ):
        try:
            share()
            found.append("")
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
    return found


@check
def fork(library: ctypes.CDLL) -> Any:
    torch.ones(4, device="cuda")
    child = os.fork()
    if child == 0:
        os._exit(0 if library.cudaDeviceSynchronize() == 3 else 1)  # cudaErrorInitializationError
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@check
def one_queue(library: ctypes.CDLL) -> Any:
    """Whether a copy that depends on nothing waits behind one of another stream that waits itself."""
    blocked, free, host = torch.cuda.Stream(), torch.cuda.Stream(), torch.ones(256).pin_memory()
    target, other = torch.empty(256, device="cuda"), torch.empty(256, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(3_000_000_000)
    slow = torch.cuda.Event()
    slow.record()
    blocked.wait_event(slow)
    with torch.cuda.stream(blocked):
        target.copy_(host, non_blocking=True)
    with torch.cuda.stream(free):
        other.copy_(host, non_blocking=True)
    free.synchronize()
    return slow.query()


@check
def gated(library: ctypes.CDLL, *names: str) -> Any:
    """The checks of gates.py, or some of them: what each has found wrong."""
    device = devices.CudaDevice(torch.device("cuda", 0))
    torch.zeros(1, device="cuda")
    return {name: gates.GATED[name](device) for name in names or gates.GATED}


def _pageable(library: ctypes.CDLL) -> int:
    return count(library, "copies from pageable memory") + count(library, "copies to pageable memory")


def _blocking(library: ctypes.CDLL) -> int:
    return _pageable(library) + sum(count(library, f"cuda{what}Synchronize") for what in ("Stream", "Device"))


def _make_run(case: stage.Case, options: EngineOptions, device: devices.CudaDevice | None = None) -> stage.Run:
    replace_triton()
    place = torch.device("cuda", 0)
    torch.zeros(1, device=place)
    return stage.Run(case, place, device or devices.CudaDevice(place), options)


@check
def engine(library: ctypes.CDLL, schedules: str = "share 0.5,share changed between steps", dtypes: str = "") -> Any:
    """The engine on CudaDevice beside the sequential update on the host: what differs, and what a step costs."""
    device, steps, differences, pageable = devices.CudaDevice(torch.device("cuda", 0)), 0, [], 0
    for number, name in enumerate(dtypes.split(";") if dtypes else stage.DTYPES):
        case = stage.make_case(name, 6000, 7, seed=number, odd=name == "mixed")
        expected = stage.expected_results(case)
        for options in (EngineOptions(threads=1), EngineOptions(threads=1, early_slots=4, resident_share=0.2)):
            run = _make_run(case, options, device)
            for schedule in schedules.split(","):
                run.restart()
                for index, share in enumerate(stage.SCHEDULES[schedule]):
                    before = _pageable(library)
                    released = run.step(index, share)
                    device.synchronize()
                    pageable += _pageable(library) - before
                    steps += 1
                    found = stage._differences(run.result(released), expected[index])
                    differences += [f"{name}, {schedule}, step {index + 1}: {', '.join(found)}"] if found else []
    return {"steps": steps, "differences": differences, "pageable copies": pageable}


@check
def host_waits(library: ctypes.CDLL) -> Any:
    """What has blocked the host in steps, by the shares that the CPU updates: no copy may."""
    found = {}
    for dtypes in ("bf16 params, FP32 grads", "bf16 params and grads"):
        case = stage.make_case(dtypes, 6000, 7, seed=3)
        run = _make_run(case, EngineOptions(threads=1, early_slots=2))
        for share in (0, 0.5, 1):
            run.restart()
            run.step(0, share)  # has its memory
            before = _blocking(library)
            run.step(1, share)
            found[f"{dtypes}, {share}"] = _blocking(library) - before
            torch.cuda.synchronize()
    return found


@check
def reading(library: ctypes.CDLL) -> Any:
    """States are asked for while the last of them are on their way to the host: what differs from those of the step."""
    case = stage.make_case("bf16 params, FP32 grads", 6000, 5, seed=4)
    expected = stage.expected_results(case)[0]
    run = _make_run(case, EngineOptions(threads=1))
    device = run.device

    class Late:
        def run(self, program: Any, handlers: Any, memory: Any) -> None:
            def states_to_host(op: Any) -> None:
                gates.Gate().open_later()
                handlers[OpKind.STATES_TO_HOST](op)

            device.run(program, {**handlers, OpKind.STATES_TO_HOST: states_to_host}, memory)

        def synchronize(self) -> None:
            device.synchronize()

    run.device = Late()
    run.step(0, 0)
    read = [run.engine.owner_states(owner)["master"].clone() for owner in range(len(run.params))]
    return [] if torch.equal(torch.cat(read).view(torch.uint8), expected[0]) else ["master"]


@check
def slots(library: ctypes.CDLL) -> Any:
    """The staging memory of a step is used again at once, while its last states are still on their way to the host."""
    case = stage.make_case("bf16 params, FP32 grads", 6000, 5, seed=4)
    expected = stage.expected_results(case)[0]
    run = _make_run(case, EngineOptions(threads=1, device_slots=2))
    places: dict[int, int] = {}
    held: list[gates.Gate] = []

    def watched(handlers: Any) -> Any:
        last = max(op.index for op in run.program(0, 0).ops if op.kind is OpKind.STATES_TO_HOST)

        def states_to_host(op: Any) -> None:
            if op.index == last:
                held.append(gates.Gate())
            handlers[OpKind.STATES_TO_HOST](op)

        return {**handlers, OpKind.STATES_TO_HOST: states_to_host}

    device = run.device

    class Watched:
        def run(self, program: Any, handlers: Any, memory: Any) -> None:
            for slot in range(2):
                for tensor in memory(("states_slot", slot)):
                    places[tensor.data_ptr()] = tensor.nbytes
            device.run(program, watched(handlers), memory)

    run.device = Watched()
    released = run.step(0, 0)
    run.device = device
    again, streams = [], []
    for address, nbytes in places.items():
        stream = _stream_of(address)
        streams.append(stream == torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again.append(torch.empty(nbytes // 4, device="cuda"))
            again[-1].fill_(float("nan"))
    gates.settle(torch.cuda.current_stream())
    for gate in held:
        gate.open()
    return {
        "the same memory": sorted(one.data_ptr() for one in again) == sorted(places),
        "of the caller's stream": all(streams),
        "differences": stage._differences(run.result(released), expected),
    }


@check
def fault(library: ctypes.CDLL) -> Any:
    """What shows first that the CUDA path has a fault, from the cheapest check to the dearest; '' for nothing."""
    device = devices.CudaDevice(torch.device("cuda", 0))
    torch.zeros(1, device="cuda")
    for name, gate in gates.GATED.items():
        try:
            if gate(device):
                return name
        except Exception as error:
            return f"{name}: {type(error).__name__}"
    try:
        if any(host_waits(library).values()):
            return "host_waits"
        if slots(library) != {"the same memory": True, "of the caller's stream": True, "differences": []}:
            return "slots"
        if reading(library):
            return "reading"
        found = engine(library, "share changed between steps", "bf16 params and grads;mixed")
        return "" if found == {"steps": 16, "differences": [], "pageable copies": 0} else "engine"
    except Exception as error:
        return f"a step: {type(error).__name__}"


@check
def mutations(library: ctypes.CDLL) -> Any:
    """Every fault can be planted, one after the other; how many."""
    from software_gpu.mutations import MUTATIONS, make

    for name in MUTATIONS:
        make(name)
    return len(MUTATIONS)


def _stream_of(address: int) -> torch.cuda.Stream:
    """The stream for which the caching allocator has given memory."""
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return torch.cuda.ExternalStream(segment["stream"]) if segment["stream"] else torch.cuda.default_stream()
    raise AssertionError("no memory of the caching allocator")
