# SPDX-License-Identifier: Apache-2.0
"""CUDA's streams and events, and the host threads of the CPU update, on one virtual clock.

Whatever is enqueued gets its time at once: it starts when what is before it on its stream has ended and the host has
enqueued it. The host's own time passes with what it does and waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from megatron_dos.program.schedule import Op, OpKind, Stream

CALL = 1e-6  # seconds that each call of the host takes


class VirtualCuda:
    """Stands in for torch.cuda, and for the `time` module of who measures.

    Args:
        duration: seconds that each operation takes.
    """

    def __init__(self, duration: Callable[[Op], float]) -> None:
        self.now = 1000.0  # the host's clock
        self.made_events = 0
        self._duration = duration
        self._cpu_free = 0.0
        self.cpu_idle = 0.0  # seconds for which the CPU had nothing to do between two of its operations
        machine = self

        class CudaStream:
            def __init__(self, device: Any = None) -> None:
                self.time = 0.0

            def wait_event(self, event: Any) -> None:
                machine.now += CALL
                self.time = max(self.time, event.time)

            def synchronize(self) -> None:
                machine.now = max(machine.now, self.time)

        class CudaEvent:
            def __init__(self, enable_timing: bool = False) -> None:
                machine.made_events += 1
                self.time, self.timed = 0.0, enable_timing

            def record(self, stream: CudaStream) -> None:
                machine.now += CALL
                self.time = stream.time = max(stream.time, machine.now)

            def query(self) -> bool:
                machine.now += CALL
                return self.time <= machine.now

            def synchronize(self) -> None:
                machine.now = max(machine.now, self.time)

            def elapsed_time(self, later: CudaEvent) -> float:
                assert self.timed
                assert later.timed
                assert self.query()
                assert later.query()
                return (later.time - self.time) * 1e3

        self.Stream, self.Event = CudaStream, CudaEvent
        self.caller = CudaStream()
        self._stack = [self.caller]

    def install(self, monkeypatch: Any) -> None:
        """Take the place of CUDA in the modules that use it."""
        from megatron_dos.device import cuda
        from megatron_dos.observing import stopwatch

        for name in ("Stream", "Event", "stream", "current_stream"):
            monkeypatch.setattr(cuda.torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(stopwatch, "time", self)
        monkeypatch.setattr(cuda, "time", self)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    def current_stream(self, device: Any = None) -> Any:
        return self._stack[-1]

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self._stack.append(stream)
        yield
        self._stack.pop()

    def handlers(self) -> dict[OpKind, Callable[[Op], Any]]:
        """Operations that take their time and do nothing."""
        return dict.fromkeys(OpKind, self._handle)

    def _handle(self, op: Op) -> Any:
        self.now += CALL
        if op.stream is not Stream.CPU:
            stream = self.current_stream()
            stream.time = max(stream.time, self.now) + self._duration(op)
            return None
        if self._cpu_free:
            self.cpu_idle += max(0.0, self.now - self._cpu_free)
        self._cpu_free = max(self._cpu_free, self.now) + self._duration(op)
        return _Ticket(self, self._cpu_free)


class _Ticket:
    def __init__(self, machine: VirtualCuda, end: float) -> None:
        self._machine, self._end = machine, end

    def poll(self) -> bool:
        self._machine.now += CALL
        return self._end <= self._machine.now

    def wait(self) -> None:
        self._machine.now = max(self._machine.now, self._end)
