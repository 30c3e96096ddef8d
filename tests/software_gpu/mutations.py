# SPDX-License-Identifier: Apache-2.0
"""Faults to plant into the CUDA path: each wait, record, synchronize and page-locking left out or in another place.

A mutation replaces text of one module. Those with a reason are equivalent: they change no result that the package
promises, and the reason says why. `make software-gpu` runs all of them, the tests some.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from software_gpu.server import Server

__all__ = ["MUTATIONS", "OF_TRAININGS", "Mutation", "make", "plant", "verdict"]

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_dos"
LIMIT_S = 120
NOT_PLANTED = 3  # exit status
CUDA, OPERATIONS, SLAB = "device/cuda.py", "update/operations.py", "node/slab.py"
ENGINE, EARLY_GRADS, GATHER = "update/engine.py", "adapter/early_grads.py", "adapter/param_gather.py"


@dataclass(frozen=True)
class Mutation:
    """Replace `old`, which is there once, by `new` in a file of the package.

    `equivalent`: the reason why no result shows it; empty where one has to.
    """

    file: str
    old: str
    new: str
    equivalent: str = ""


def _without_stream(name: str, old: str, new: str) -> dict[str, Mutation]:
    """One mutation for each stream of the device: the streams are asked for with that one left out."""
    streams = ("COMPUTE", "CAST", "STATES_H2D", "STATES_D2H", "GRAD_D2H", "PARAM_H2D")
    kept = "[s for n, s in self._streams.items() if n is not Stream.{}]"
    return {
        f"{name} {stream}": Mutation(CUDA, old, new.format(kept=kept.format(stream))) for stream in streams
    }


MUTATIONS: dict[str, Mutation] = {
    # begin and join
    "begin does not wait for the caller": Mutation(
        CUDA, "        self._after(torch.cuda.current_stream(self._device), [stream])\n", ""
    ),
    "begin lets the caller wait instead": Mutation(
        CUDA,
        "self._after(torch.cuda.current_stream(self._device), [stream])",
        "self._after(stream, [torch.cuda.current_stream(self._device)])",
    ),
    "begin waits only after its operation": Mutation(
        CUDA,
        "        self._after(torch.cuda.current_stream(self._device), [stream])\n"
        "        with torch.cuda.stream(stream):\n            handler(op)\n",
        "        with torch.cuda.stream(stream):\n            handler(op)\n"
        "        self._after(torch.cuda.current_stream(self._device), [stream])\n",
    ),
    "begin runs its operation on the stream of the caller": Mutation(
        CUDA,
        "        with torch.cuda.stream(stream):\n            handler(op)\n        event = self._begun",
        "        handler(op)\n        event = self._begun",
    ),
    "begin records nothing": Mutation(
        CUDA, "        event.record(stream)\n        self._begun[", "        self._begun["
    ),
    "begin records on the stream of the caller": Mutation(
        CUDA, "        event.record(stream)\n        self._begun[", "        event.record()\n        self._begun["
    ),
    "begin records before its operation": Mutation(
        CUDA,
        "            handler(op)\n        event = self._begun.pop(op.subgroup, None) or self._take_event()\n"
        "        event.record(stream)\n",
        "            event = self._begun.pop(op.subgroup, None) or self._take_event()\n"
        "            event.record(stream)\n            handler(op)\n",
    ),
    "join does not wait": Mutation(
        CUDA,
        "            self._after(self._streams[Stream.GRAD_D2H], [torch.cuda.current_stream(self._device)])\n",
        "",
    ),
    "join waits for another stream": Mutation(
        CUDA,
        "self._after(self._streams[Stream.GRAD_D2H], [torch",
        "self._after(self._streams[Stream.STATES_D2H], [torch",
    ),
    "join lets the stream wait instead": Mutation(
        CUDA,
        "self._after(self._streams[Stream.GRAD_D2H], [torch.cuda.current_stream(self._device)])",
        "self._after(torch.cuda.current_stream(self._device), [self._streams[Stream.GRAD_D2H]])",
    ),
    "join keeps what was begun": Mutation(
        CUDA,
        "            self._spare_events += self._begun.values()\n            self._begun = {}\n",
        "",
    ),
    # The two ends of a run
    "run waits for nothing": Mutation(CUDA, "        self._after(caller, self._streams.values())\n", ""),
    "run lets the caller wait instead": Mutation(
        CUDA,
        "self._after(caller, self._streams.values())",
        "[self._after(s, [caller]) for s in self._streams.values()]",
    ),
    "run waits for the caller at its end": Mutation(
        CUDA,
        "        self._after(caller, self._streams.values())\n        run = _Run(program, handlers, "
        "{**self._streams, Stream.RELEASE: caller}, self._take_event, self._begun)\n",
        "        run = _Run(program, handlers, "
        "{**self._streams, Stream.RELEASE: caller}, self._take_event, self._begun)\n"
        "        enqueue_all = run.to_the_end\n"
        "        run.to_the_end = lambda: (enqueue_all(), self._after(caller, self._streams.values()))\n",
    ),
    **_without_stream(
        "run does not wait on", "self._after(caller, self._streams.values())", "self._after(caller, {kept})"
    ),
    "the caller waits for nothing after a run": Mutation(
        CUDA,
        "            for stream in self._streams.values():\n                self._after(stream, [caller])\n",
        "",
    ),
    **_without_stream(
        "the caller does not wait for",
        "for stream in self._streams.values():\n                self._after(",
        "for stream in {kept}:\n                self._after(",
    ),
    "the caller waits only where nothing failed": Mutation(
        CUDA,
        "        finally:\n"
        "            # Also after an error: what is in flight must end before its memory is used again.\n",
        "        except ZeroDivisionError:\n            pass\n        else:\n",
    ),
    "updates on the CPU are not awaited": Mutation(
        CUDA, "failures = run.wait_for_tickets()", "failures = []"
    ),
    "updates on the CPU are awaited up to the first that fails": Mutation(
        CUDA,
        "                failures.append(error)\n",
        "                failures.append(error)\n                break\n",
    ),
    "what updates raise at the end is lost": Mutation(
        CUDA, "        if failures:\n            raise failures[0]\n", ""
    ),
    "buckets are released beside the caller's stream": Mutation(
        CUDA,
        "{**self._streams, Stream.RELEASE: caller}",
        "{**self._streams, Stream.RELEASE: self._streams[Stream.CAST]}",
    ),
    "a run keeps what it did not begin": Mutation(
        CUDA,
        "  # of subgroups that the GPU updates after all\n        self._begun = {}\n",
        "\n",
    ),
    # _after
    "no wait is recorded": Mutation(
        CUDA, "        event.record(stream)\n        for other", "        for other"
    ),
    "waits are recorded too late": Mutation(
        CUDA,
        "        event.record(stream)\n        for other in others:\n            other.wait_event(event)\n",
        "        for other in others:\n            other.wait_event(event)\n        event.record(stream)\n",
    ),
    "no stream waits": Mutation(CUDA, "            other.wait_event(event)\n", "            pass\n"),
    "waits are recorded on the current stream": Mutation(
        CUDA, "        event.record(stream)\n        for other", "        event.record()\n        for other"
    ),
    "waits make an event each time": Mutation(
        CUDA,
        "        self._spare_events.append(event)  # a wait",
        "        # a wait",
        "events are used again only to save making them",
    ),
    # synchronize
    "synchronize does nothing": Mutation(CUDA, "            stream.synchronize()\n", "            pass\n"),
    **_without_stream(
        "synchronize misses",
        "for stream in self._streams.values():\n            stream.synch",
        "for stream in {kept}:\n            stream.synch",
    ),
    # One operation after the other
    "the device does not wait for the CPU": Mutation(
        CUDA, "op.stream is Stream.CPU or self._cpu_ended(dependency)", "True"
    ),
    "the CPU does not wait for the device": Mutation(
        CUDA, "op.stream is not Stream.CPU or self.events[dependency].query()", "True"
    ),
    "the CPU waits on the host for the device": Mutation(
        CUDA,
        "op.stream is not Stream.CPU or self.events[dependency].query()",
        "op.stream is not Stream.CPU or self.events[dependency].synchronize() or True",
        "the order is the same; the thread that enqueues stops, which costs time and changes no result",
    ),
    "an operation is enqueued before what it waits for": Mutation(
        CUDA,
        "        if dependency not in self._enqueued:\n            return False\n",
        "        if dependency not in self._enqueued:\n            return True\n",
    ),
    "what an update raised is lost": Mutation(
        CUDA, "            self._tickets.pop(index).wait()  # raises what the update raised\n",
        "            self._tickets.pop(index)\n",
    ),
    "every update has ended": Mutation(
        CUDA, "if index in self._tickets and self._tickets[index].poll():", "if index in self._tickets:",
        "the ticket is waited for in the next line: the thread that enqueues stops, which costs time alone",
    ),
    "operations wait for no event": Mutation(
        CUDA, "                cuda_stream.wait_event(self.events[dependency])\n", "                pass\n"
    ),
    "operations wait for one event": Mutation(
        CUDA,
        "                cuda_stream.wait_event(self.events[dependency])\n",
        "                cuda_stream.wait_event(self.events[dependency])\n                break\n",
    ),
    "operations wait after they were enqueued": Mutation(
        CUDA,
        "        for dependency in op.depends_on:\n            if not self._is_cpu(dependency):\n"
        "                cuda_stream.wait_event(self.events[dependency])\n"
        "        with torch.cuda.stream(cuda_stream):\n            self._handlers[op.kind](op)\n",
        "        with torch.cuda.stream(cuda_stream):\n            self._handlers[op.kind](op)\n"
        "        for dependency in op.depends_on:\n            if not self._is_cpu(dependency):\n"
        "                cuda_stream.wait_event(self.events[dependency])\n",
    ),
    "the caller's stream waits for events": Mutation(
        CUDA, "cuda_stream.wait_event(self.events", "torch.cuda.current_stream().wait_event(self.events"
    ),
    "operations run on the stream of the caller": Mutation(
        CUDA, "        with torch.cuda.stream(cuda_stream):\n", "        if True:\n"
    ),
    "operations record nothing": Mutation(CUDA, "            event.record(cuda_stream)\n", ""),
    "operations record on the stream of the caller": Mutation(
        CUDA, "            event.record(cuda_stream)\n", "            event.record()\n"
    ),
    "operations record before they run": Mutation(
        CUDA,
        "        with torch.cuda.stream(cuda_stream):\n            self._handlers[op.kind](op)\n"
        "        self._enqueued.add(op.index)\n"
        "        if op.index in self._waited_for:\n            event = self._take_event()\n"
        "            event.record(cuda_stream)\n            self.events[op.index] = event\n",
        "        self._enqueued.add(op.index)\n"
        "        if op.index in self._waited_for:\n            event = self._take_event()\n"
        "            event.record(cuda_stream)\n            self.events[op.index] = event\n"
        "        with torch.cuda.stream(cuda_stream):\n            self._handlers[op.kind](op)\n",
    ),
    "every operation records": Mutation(
        CUDA, "        if op.index in self._waited_for:\n            event =", "        if True:\n            event =",
        "an event more than needed, which nothing waits for",
    ),
    # _block
    "a blocked run does not wait for events": Mutation(
        CUDA, "                event.synchronize()\n", "                pass\n",
        "what was waited for is asked again before anything is enqueued; it costs a busy thread",
    ),
    "a blocked run does not wait for updates": Mutation(
        CUDA,
        "        self._tickets.pop(index).wait()\n        self._ended",
        "        self._tickets.pop(index)\n        self._ended",
    ),
    "a blocked run waits for updates alone": Mutation(
        CUDA, "        if before_next and len(events) == len(before_next):\n", "        if False:\n",
        "the next update on the CPU is submitted later, when the one before has ended; the order is the same",
    ),
    # Copies, staging memory, page-locking
    "casts are blocking": Mutation(
        OPERATIONS, ".copy_(self._grad(piece), non_blocking=True)", ".copy_(self._grad(piece))",
        "torch blocks the host for no copy within the device",
    ),
    "cast grads are sent blocking": Mutation(
        OPERATIONS, ".copy_(source, non_blocking=True)\n            return", ".copy_(source)\n            return"
    ),
    "grads are sent blocking": Mutation(
        OPERATIONS, "grad.dtype).copy_(grad, non_blocking=True)", "grad.dtype).copy_(grad)"
    ),
    "params are sent blocking": Mutation(
        OPERATIONS, "self._staged_param(op, at, piece), non_blocking=True)", "self._staged_param(op, at, piece))"
    ),
    "states are copied blocking": Mutation(
        OPERATIONS, "target.copy_(source, non_blocking=True)", "target.copy_(source)"
    ),
    "slots are of another stream": Mutation(
        OPERATIONS,
        "        self._states_slots = [\n            torch.empty((len(STATES), _aligned(max(streamed))), "
        "dtype=torch.float32, device=device)\n            for _ in range(min(program.device_slots, len(streamed)))\n"
        "        ]\n",
        "        with torch.cuda.stream(torch.cuda.Stream()):\n            self._states_slots = [\n"
        "                torch.empty((len(STATES), _aligned(max(streamed))), dtype=torch.float32, device=device)\n"
        "                for _ in range(min(program.device_slots, len(streamed)))\n            ]\n",
    ),
    "states are read while they are on their way": Mutation(
        ENGINE, "            self._device.synchronize()\n            self._in_flight = False\n",
        "            self._in_flight = False\n",
    ),
    "host memory is not page-locked": Mutation(SLAB, "        _page_lock(slab)\n", "        pass\n"),
}


OF_TRAININGS: dict[str, Mutation] = {
    "early grads do not wait for their reduction": Mutation(
        EARLY_GRADS, "self._grads.__getitem__, group.grad_reduce_handle.wait)", "self._grads.__getitem__)"
    ),
    "gathers do not wait for the update": Mutation(
        GATHER, " and self._groups[self._started][0] <= self._written:", ":"
    ),
}
"""Faults of what lies between Megatron and the engine, which only a training can show."""


def plant(server: Server, name: str) -> str:
    """What a planted fault has shown in, '' for nothing."""
    outcome = server.run("fault", name, LIMIT_S, SOFTWARE_GPU_DELAY_US="20")
    if outcome.code == NOT_PLANTED:
        raise RuntimeError(outcome.log)
    if outcome.code < 0:
        return "does not end" if outcome.code == -9 else f"signal {-outcome.code}"
    return outcome.result if outcome.code == 0 else "an error: " + outcome.log.strip().splitlines()[-1]


def verdict(name: str, shown: str) -> str:
    """Of a mutation: seen, equivalent or missed; or that its reason is wrong."""
    equivalent = MUTATIONS[name].equivalent
    if shown:
        return "seen, though called equivalent" if equivalent else "seen"
    return "equivalent" if equivalent else "missed"


def make(name: str) -> None:
    """Plant the fault into this process: run the changed module and have all others use what it defines."""
    mutation = {**MUTATIONS, **OF_TRAININGS}[name]
    path = PACKAGE / mutation.file
    source = path.read_text()
    if source.count(mutation.old) != 1:
        raise ValueError(f"{name}: the text to replace is {source.count(mutation.old)} times in {mutation.file}")
    module = importlib.import_module("megatron_dos." + mutation.file.removesuffix(".py").replace("/", "."))
    before = dict(vars(module))
    exec(compile(source.replace(mutation.old, mutation.new), str(path), "exec"), vars(module))
    for other in list(sys.modules.values()):
        for key, value in list(vars(other).items()) if getattr(other, "__name__", "").startswith(
            ("megatron_dos", "software_gpu")
        ) else ():
            if key in before and value is before[key] and getattr(value, "__module__", "") == module.__name__:
                setattr(other, key, getattr(module, key))
