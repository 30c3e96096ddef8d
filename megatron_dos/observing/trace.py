# SPDX-License-Identifier: Apache-2.0
"""Spans of time on lanes, and two ways to look at them: a trace for Perfetto, and a picture.

A span says what occupied a lane, from when and for how long. A timeline gives spans (`spans_of`), be it that of the
virtual clock or of a real step: nothing here knows where its times come from.

Both outputs take *tracks*: spans by the name of what they belong to, such as a rank or one of several programs to
compare. Times are seconds on one clock for all tracks.

[Note: rows] A trace has one row a lane. A viewer nests what overlaps within a row as if one called the other, so where
a lane runs several operations at once (two streams that copy in one direction), the lane gets further rows, as many as
it runs at once.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_dos.files import new_file
from megatron_dos.program.schedule import OpKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megatron_dos.program.schedule import Op
    from megatron_dos.program.timeline import Timeline

__all__ = [
    "MissingPlotLibraryError",
    "Span",
    "Tracks",
    "busy_fraction",
    "chrome_events",
    "draw",
    "figure_of",
    "lanes_of",
    "spans_of",
    "write_chrome_trace",
]


class MissingPlotLibraryError(RuntimeError):
    """matplotlib, which draws, is not installed."""


@dataclass(frozen=True)
class Span:
    """What occupied a lane for a while.

    Attributes:
        lane: a link's direction, a processor: "gpu", "h2d", "d2h", "cpu", ...
        name: of the operation; equal names have one colour.
        start_s: seconds from any origin that all spans of a trace share.
        duration_s: seconds; 0 for what has only a moment, such as handing a bucket on.
        args: what a viewer shows beside it: "subgroup", "slot", "bucket", and "bytes" moved, of which rates are made.

    Raises:
        ValueError: a time is not finite, or the duration negative.
    """

    lane: str
    name: str
    start_s: float
    duration_s: float
    args: Mapping[str, int | float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.start_s):
            raise ValueError(f"start_s of {self.name} on {self.lane}: must be finite, got {self.start_s}")
        if not (math.isfinite(self.duration_s) and self.duration_s >= 0):
            raise ValueError(f"duration_s of {self.name} on {self.lane}: finite, at least 0; got {self.duration_s}")

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


Tracks = Mapping[str, Sequence[Span]]
"""Spans by the name of the rank, or of the program, that they belong to."""

_ORDER = ("gpu", "h2d", "d2h", "cpu", "release")


def spans_of(
    timeline: Timeline, nbytes: Callable[[Op], int | None] = lambda op: None, offset_s: float = 0.0
) -> list[Span]:
    """The spans of a run, measured or on the virtual clock.

    Args:
        timeline: the run.
        nbytes: bytes that an operation moves over its lane, None where bytes are not its measure.
        offset_s: seconds at which the program starts.
    """
    spans = []
    for lane, indices in timeline.lanes.items():
        for index in indices:
            op = timeline.program.ops[index]
            if op.kind is OpKind.RELEASE_BUCKET:
                args = {"bucket": op.subgroup}
            else:
                moved = nbytes(op)
                args = {"subgroup": op.subgroup, "slot": op.slot, **({} if moved is None else {"bytes": moved})}
            start, end = timeline.starts[index], timeline.ends[index]
            spans.append(Span(lane, op.kind.value, offset_s + start, end - start, args))
    return spans


def lanes_of(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of each lane by their start; well-known lanes first, in the order of a diagram, then the others."""
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    known = [lane for lane in _ORDER if lane in lanes]
    return {
        lane: sorted(lanes[lane], key=lambda span: (span.start_s, span.end_s))
        for lane in known + [lane for lane in lanes if lane not in known]
    }


def busy_fraction(spans: Sequence[Span], begin_s: float, end_s: float) -> float:
    """The part of the time from `begin_s` to `end_s` in which at least one of the spans runs; 0 for an empty time."""
    busy, until = 0.0, begin_s
    for span in sorted(spans, key=lambda span: span.start_s):
        start, end = max(span.start_s, until), min(span.end_s, end_s)
        if end > start:
            busy += end - start
            until = end
    return min(busy / (end_s - begin_s), 1.0) if end_s > begin_s else 0.0


# --- A trace for Perfetto and chrome://tracing


def write_chrome_trace(
    path: str | os.PathLike[str],
    tracks: Tracks,
    first_pid: int = 0,
    about: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a trace that https://ui.perfetto.dev and chrome://tracing open.

    Args:
        path: the file, which appears whole or not at all.
        tracks: each becomes a process of the trace, with one row a lane (see [Note: rows]) and, for lanes whose spans
            have "bytes", a counter of GB/s.
        first_pid: number of the first process. With the rank's number, traces of several ranks can be merged.
        about: whatever else the file should tell, as `otherData`; must be serialisable as JSON.
        overwrite: replace a file that is there.

    Raises:
        FileExistsError: the file is there, and `overwrite` is false.
    """
    trace = {
        "traceEvents": list(chrome_events(tracks, first_pid)),
        "displayTimeUnit": "ms",
        "otherData": dict(about or {}),
    }
    text = json.dumps(trace, allow_nan=False, separators=(",", ":"))
    with new_file(path, overwrite) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def chrome_events(tracks: Tracks, first_pid: int = 0) -> Iterator[dict[str, Any]]:
    """The events of the "trace event format" (Chromium's document of that name): times in microseconds.

    Metadata (M) names processes and rows and puts rows in order, complete events (X) are spans, instant events (i) are
    those without duration, counters (C) are rates.
    """
    for pid, (track, spans) in enumerate(tracks.items(), first_pid):
        yield _metadata("process_name", pid, 0, name=track)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        tids = itertools.count(1)
        for lane, members in lanes_of(spans).items():
            for number, row in enumerate(_rows(members), 1):
                tid = next(tids)
                yield _metadata("thread_name", pid, tid, name=lane if number == 1 else f"{lane} ({number})")
                yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
                for span in row:
                    yield _span_event(span, pid, tid)
            yield from _rate_events(lane, members, pid)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _span_event(span: Span, pid: int, tid: int) -> dict[str, Any]:
    start, end = _nanoseconds(span)
    event = {"name": span.name, "cat": span.lane, "pid": pid, "tid": tid, "ts": start / 1e3, "args": dict(span.args)}
    if span.duration_s == 0:
        return {**event, "ph": "i", "s": "t"}  # a mark on this row
    return {**event, "ph": "X", "dur": (end - start) / 1e3}


def _nanoseconds(span: Span) -> tuple[int, int]:
    """Start and end, both rounded: rounding a duration would make spans overlap that touch."""
    return round(span.start_s * 1e9), round(span.end_s * 1e9)


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans, which are sorted by start, in as few rows as it takes for no two of a row to overlap."""
    rows: list[list[Span]] = []
    free_at: list[int] = []
    for span in spans:
        start, end = _nanoseconds(span)
        row = next((index for index, free in enumerate(free_at) if free <= start), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free_at.append(start)
        rows[row].append(span)
        free_at[row] = end
    return rows


def _rate_events(lane: str, spans: Sequence[Span], pid: int) -> Iterator[dict[str, Any]]:
    """A counter of the bytes that the lane moves each second, wherever that changes."""
    changes: dict[int, float] = {}
    for span in spans:
        start, end = _nanoseconds(span)
        if "bytes" in span.args and end > start:
            rate = float(span.args["bytes"]) / (end - start)  # bytes a nanosecond are GB/s
            changes[start] = changes.get(start, 0.0) + rate
            changes[end] = changes.get(end, 0.0) - rate
    rate = 0.0
    for moment in sorted(changes):
        rate = max(rate + changes[moment], 0.0)
        args = {"GB/s": round(rate, 3)}
        yield {"ph": "C", "name": f"{lane} GB/s", "pid": pid, "tid": 0, "ts": moment / 1e3, "args": args}


# --- A picture


def draw(path: str | os.PathLike[str], tracks: Tracks, title: str = "") -> None:
    """Draw the tracks below one another, a row a lane with its busy fraction at the margin, into a PNG file.

    Args:
        path: the file, which appears whole or not at all.
        tracks: as for `write_chrome_trace`.
        title: over the picture.

    Raises:
        MissingPlotLibraryError: matplotlib is not installed.
        FileExistsError: the file is there.
    """
    figure = figure_of(tracks, title)
    with new_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")


def figure_of(tracks: Tracks, title: str = "") -> Figure:
    """The picture that `draw` writes.

    Raises:
        MissingPlotLibraryError: matplotlib is not installed.
        ValueError: there is no span to draw.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise MissingPlotLibraryError(
            'pictures need matplotlib, which is not installed: pip install matplotlib, or "megatron-dos[plots]"'
        ) from None
    spans = [span for track in tracks.values() for span in track]
    if not spans:
        raise ValueError("tracks: no span to draw")
    begin, end = min(span.start_s for span in spans), max(span.end_s for span in spans)
    names = list(dict.fromkeys(span.name for lane in lanes_of(spans).values() for span in lane))
    listed: Any = colormaps["tab10" if len(names) <= 10 else "tab20"]
    palette = listed.colors
    colours = {name: palette[index % len(palette)] for index, name in enumerate(names)}
    heights = [max(len(lanes_of(track)), 1) for track in tracks.values()]
    # No pyplot: it would choose a backend for the whole process, and keep the figure.
    figure = Figure(figsize=(12, 0.4 * sum(heights) + 0.7 * len(heights) + 0.8), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (track, members) in zip(panels[:, 0], tracks.items(), strict=True):
        _draw_track(axes, members, colours, begin, end)
        axes.set_title(track, loc="left", fontsize=9)
    panels[-1, 0].set_xlabel("seconds")
    figure.legend(
        handles=[Patch(color=colours[name], label=name.replace("_", " ")) for name in names],
        loc="outside lower center",
        ncols=min(len(names), 6),
        fontsize=8,
        frameon=False,
    )
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _draw_track(axes: Any, spans: Sequence[Span], colours: Mapping[str, Any], begin: float, end: float) -> None:
    lanes = lanes_of(spans)
    # A track is as long as its own spans; what is left of the picture is not idle time of its lanes.
    over = max((span.end_s for span in spans), default=begin)
    for row, (lane, members) in enumerate(lanes.items()):
        depth = _rows(members)
        for number, in_row in enumerate(depth):
            height = 0.8 / len(depth)
            bottom = row - 0.4 + number * height
            for name in dict.fromkeys(span.name for span in in_row):
                lasting = [(s.start_s, s.duration_s) for s in in_row if s.name == name and s.duration_s > 0]
                moments = [s.start_s for s in in_row if s.name == name and s.duration_s == 0]
                if lasting:
                    edge = [0.6 * part for part in colours[name]]  # darker: parts neighbours, and shows the shortest
                    bars = axes.broken_barh(
                        lasting, (bottom, height), facecolors=colours[name], edgecolors=[edge], linewidth=0.4
                    )
                    bars.set_gid(f"{lane}:{name}")
                if moments:
                    marks = axes.vlines(moments, bottom, bottom + height, colors=colours[name], linewidth=1)
                    marks.set_gid(f"{lane}:{name}")
        if any(span.duration_s > 0 for span in members):
            busy = f"{busy_fraction(members, begin, over):.0%} busy"
            axes.text(1.01, row, busy, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_yticks(range(len(lanes)), list(lanes), fontsize=8)
    axes.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    axes.set_xlim(begin, end if end > begin else begin + 1e-9)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
