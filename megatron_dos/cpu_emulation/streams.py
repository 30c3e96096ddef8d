# SPDX-License-Identifier: Apache-2.0
"""Streams and events. Work is done when the call returns, so ordering holds by itself."""

from __future__ import annotations

import time
from typing import Any

from megatron_dos.cpu_emulation.base import NotCoveredError
from megatron_dos.cpu_emulation.devices import device_index
from megatron_dos.cpu_emulation.host_tensors import STAND_IN_DEVICE


class Stream:
    """A stream that is always idle, since CPU work runs inline."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        if kwargs:
            raise NotCoveredError(f"torch.cuda.Stream({', '.join(kwargs)}=...)")
        self.device = STAND_IN_DEVICE
        self.device_index = device_index(device)
        self.priority = priority
        self.cuda_stream = 0
        self._previous: list[Stream] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def wait_stream(self, stream: Stream) -> None:
        check_stream(stream, "wait_stream")

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
        check_stream(stream or current_stream(), "record")
        self._recorded = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        check_stream(stream or current_stream(), "wait")

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


def check_stream(stream: object, where: str) -> None:
    if not isinstance(stream, Stream):
        raise TypeError(f"{where} needs a torch.cuda.Stream, not {type(stream).__name__}")


class _State:
    default_stream: Stream | None = None
    stream: Stream | None = None


def default_stream(device: Any = None) -> Stream:
    if _State.default_stream is None:
        _State.default_stream = Stream()
    return _State.default_stream


def current_stream(device: Any = None) -> Stream:
    return _State.stream or default_stream()


def set_stream(stream: Stream) -> None:
    check_stream(stream, "set_stream")
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
