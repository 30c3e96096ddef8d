# SPDX-License-Identifier: Apache-2.0
"""What the tests run in a process of its own: `python checks.py FOLDER CHECK`, with the libraries in FOLDER.

Each check returns a value that is printed as JSON. torch is imported after the software GPU is in place.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import software_gpu

CHECKS: dict[str, Callable[[ctypes.CDLL], Any]] = {}


def check(function: Callable[[ctypes.CDLL], Any]) -> Callable[[ctypes.CDLL], Any]:
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
    import torch

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
    import torch

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
    import torch

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
    import torch

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
    import torch

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
    import torch

    return ctypes.c_float.from_address(torch.ones(8, device="cuda").data_ptr()).value


@check
def failures(library: ctypes.CDLL) -> Any:
    """Calls that are to fail do, once, with torch's error."""
    import torch

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


@check
def fork(library: ctypes.CDLL) -> Any:
    import torch

    torch.ones(4, device="cuda")
    child = os.fork()
    if child == 0:
        os._exit(0 if library.cudaDeviceSynchronize() == 3 else 1)  # cudaErrorInitializationError
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@check
def one_queue(library: ctypes.CDLL) -> Any:
    """Whether a copy that depends on nothing waits behind one of another stream that waits itself."""
    import torch

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
def engine(library: ctypes.CDLL) -> Any:
    """The engine on CudaDevice beside the sequential update on the host: what differs, and what a step costs."""
    import torch

    from megatron_dos.device import CudaDevice
    from megatron_dos.gpu_check import engine as stage
    from megatron_dos.update.engine import EngineOptions
    from software_gpu.kernels import replace_triton

    replace_triton()
    place = torch.device("cuda", 0)
    torch.zeros(1, device=place)
    device, steps, differences = CudaDevice(place), 0, []
    pageable = 0
    for number, dtypes in enumerate(stage.DTYPES):
        case = stage.make_case(dtypes, 6000, 7, seed=number, odd=dtypes == "mixed")
        expected = stage.expected_results(case)
        for options in (EngineOptions(threads=1), EngineOptions(threads=1, early_slots=4, resident_share=0.2)):
            run = stage.Run(case, place, device, options)
            for name in ("share 0.5", "share changed between steps"):
                run.restart()
                for index, share in enumerate(stage.SCHEDULES[name]):
                    before = count(library, "copies from pageable memory") + count(library, "copies to pageable memory")
                    released = run.step(index, share)
                    device.synchronize()
                    after = count(library, "copies from pageable memory") + count(library, "copies to pageable memory")
                    pageable += after - before
                    steps += 1
                    found = stage._differences(run.result(released), expected[index])
                    differences += [f"{dtypes}, {name}, step {index + 1}: {', '.join(found)}"] if found else []
    return {"steps": steps, "differences": differences, "pageable copies": pageable}


if __name__ == "__main__":
    import faulthandler

    faulthandler.enable()
    print(json.dumps(CHECKS[sys.argv[2]](software_gpu.activate(Path(sys.argv[1])))))
    sys.stdout.flush()
