# SPDX-License-Identifier: Apache-2.0
"""Traces and pictures of spans: what viewers accept, and that nothing is lost on the way."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dos.files import new_file, new_files
from megatron_dos.observing import trace
from megatron_dos.observing.trace import Span, busy_fraction, figure_of, lanes_of, spans_of, write_chrome_trace
from megatron_dos.planning.clock import Sharing, simulate
from megatron_dos.program.schedule import OpKind, Placement, Stream, SubgroupShape, build_program
from megatron_dos.program.timeline import FULL_DUPLEX

# --- The schema, as far as it is used, of the document "Trace Event Format" of the Chromium project -------------------

METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
METADATA["thread_sort_index"] = "sort_index"


def check_schema(document: Any) -> dict[tuple[int, int], list[dict]]:
    """Fail where the document breaks the format; the spans of each row otherwise."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    assert isinstance(events, list)
    named: dict[str, set] = defaultdict(set)
    rows: dict[tuple[int, int], list[dict]] = defaultdict(list)
    for event in events:
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["args"], dict)
        row = (event["pid"], event["tid"])
        fields = {"ph", "name", "pid", "tid", "args"}
        if event["ph"] == "M":
            assert set(event["args"]) == {METADATA[event["name"]]}
            value = event["args"][METADATA[event["name"]]]
            assert type(value) is (str if event["name"].endswith("_name") else int)
            key = row if event["name"].startswith("thread") else event["pid"]
            assert key not in named[event["name"]], f"{event['name']} given twice for {key}"
            named[event["name"]].add(key)
            assert set(event) == fields
            continue
        assert isinstance(event["ts"], float)
        assert math.isfinite(event["ts"])
        if event["ph"] == "X":
            assert set(event) == fields | {"cat", "ts", "dur"}
            assert isinstance(event["dur"], float)
            assert 0 <= event["dur"] < math.inf
            rows[row].append(event)
        elif event["ph"] == "i":
            assert set(event) == fields | {"cat", "ts", "s"}
            assert event["s"] in ("t", "p", "g")
            rows[row].append(event)
        else:
            assert event["ph"] == "C", f"unknown phase {event['ph']}"
            assert set(event) == fields | {"ts"}
            assert all(isinstance(value, (int, float)) and value >= 0 for value in event["args"].values())
    for row, members in rows.items():
        assert row in named["thread_name"], f"row {row} has no name"
        assert row in named["thread_sort_index"]
        assert row[0] in named["process_name"]
        members.sort(key=lambda event: (event["ts"], event.get("dur", 0.0)))
        until = -math.inf
        for event in members:
            assert event["ts"] >= until - 1e-6, f"{event} overlaps with the one before it in its row"
            until = max(until, event["ts"] + event.get("dur", 0.0))
    return rows


# --- Spans ------------------------------------------------------------------------------------------------------------


def timeline(sharing=Sharing.TURNS):
    placements = [Placement.HOST, Placement.STREAMED, Placement.STREAMED, Placement.HOST, Placement.RESIDENT]
    shapes = [SubgroupShape((0, index // 3), 100 + index, True) for index in range(5)]
    program = build_program(shapes, placements)
    return simulate(program, lambda op: 0.0 if op.kind is OpKind.RELEASE_BUCKET else 0.25, FULL_DUPLEX, sharing)


def nbytes(op):
    return 1200 if op.stream in (Stream.STATES_H2D, Stream.STATES_D2H) else None


SPANS = [
    Span("cpu", "update_on_host", 0.0, 2.0, {"subgroup": 0, "slot": 0}),
    Span("h2d", "states_to_device", 0.5, 1.0, {"subgroup": 1, "slot": 0, "bytes": 2 * 10**9}),
    Span("h2d", "param_to_device", 1.0, 1.0, {"subgroup": 0, "slot": 0, "bytes": 10**9}),
    Span("gpu", "forward", 0.0, 0.5),
    Span("release", "release_bucket", 2.0, 0.0, {"bucket": 0}),
]


def written(tmp_path, tracks, **options):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, tracks, **options)
    return json.loads(path.read_text())


def test_every_operation_of_a_simulated_program_is_one_span():
    ran = timeline()
    spans = spans_of(ran, nbytes, offset_s=3.0)
    assert len(spans) == len(ran.program.ops)
    for op, start, end in zip(ran.program.ops, ran.starts, ran.ends, strict=True):
        lane = FULL_DUPLEX[op.stream]
        args = {"bucket": op.subgroup}
        if op.kind is not OpKind.RELEASE_BUCKET:
            args = {"subgroup": op.subgroup, "slot": op.slot}
            if nbytes(op):
                args["bytes"] = 1200
        assert Span(lane, op.kind.value, 3.0 + start, end - start, args) in spans


@pytest.mark.parametrize(("start", "duration"), [(math.nan, 1.0), (0.0, -1.0), (0.0, math.inf)])
def test_times_that_no_clock_gives_are_refused(start, duration):
    with pytest.raises(ValueError, match="of update on cpu"):
        Span("cpu", "update", start, duration)


def test_lanes_come_in_the_order_of_a_diagram_and_unknown_ones_last():
    spans = [Span(lane, "x", 0.0, 1.0) for lane in ("tape", "cpu", "d2h", "gpu", "h2d")]
    assert list(lanes_of(spans)) == ["gpu", "h2d", "d2h", "cpu", "tape"]


def test_busy_fraction_counts_overlapping_spans_once_and_within_the_time_only():
    lane = [Span("h2d", "a", 0.0, 2.0), Span("h2d", "b", 1.0, 2.0), Span("h2d", "c", 8.0, 4.0)]
    assert busy_fraction(lane, 0.0, 10.0) == pytest.approx(0.5)
    assert busy_fraction(lane, 1.0, 3.0) == 1.0
    assert busy_fraction([], 0.0, 1.0) == 0.0
    assert busy_fraction(lane, 1.0, 1.0) == 0.0


# --- Chrome's format --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", list(Sharing))
def test_trace_of_a_simulated_program_keeps_the_format_and_all_spans(tmp_path, sharing):
    spans = spans_of(timeline(sharing), nbytes)
    rows = check_schema(written(tmp_path, {"ours": spans}))
    found = sorted((event["name"], event["ts"], event.get("dur", 0.0)) for row in rows.values() for event in row)
    wanted = sorted((span.name, span.start_s * 1e6, span.duration_s * 1e6) for span in spans)
    for event, span in zip(found, wanted, strict=True):
        assert event[0] == span[0]
        assert event[1:] == pytest.approx(span[1:], abs=2e-3)


def test_rows_carry_the_lanes_names_in_order_and_a_lane_gets_a_second_row_only_for_what_overlaps(tmp_path):
    document = written(tmp_path, {"rank 3": SPANS}, first_pid=3)
    rows = check_schema(document)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert [names[row] for row in sorted(names)] == ["gpu", "h2d", "h2d (2)", "cpu", "release"]
    for row, events in rows.items():
        assert all(names[row].split(" ")[0] == event["cat"] for event in events)
    assert {row[0] for row in rows} == {3}


def test_arguments_reach_the_viewer_and_bytes_become_a_rate(tmp_path):
    document = written(tmp_path, {"rank 0": SPANS}, about={"machine": "h200"})
    assert document["otherData"] == {"machine": "h200"}
    states = next(event for event in document["traceEvents"] if event["name"] == "states_to_device")
    assert (states["ts"], states["dur"]) == (0.5e6, 1e6)
    assert states["args"] == {"subgroup": 1, "slot": 0, "bytes": 2 * 10**9}
    rates = [(e["ts"], e["args"]["GB/s"]) for e in document["traceEvents"] if e["name"] == "h2d GB/s"]
    assert rates == [(0.5e6, 2.0), (1e6, 3.0), (1.5e6, 1.0), (2e6, 0.0)]


def test_tracks_become_processes(tmp_path):
    document = written(tmp_path, {"ours": SPANS, "k=2": SPANS[:2]})
    check_schema(document)
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert names == ["ours", "k=2"]


span_values = st.builds(
    Span,
    lane=st.sampled_from(["gpu", "h2d", "cpu", "other"]),
    name=st.sampled_from(["a", "b"]),
    start_s=st.floats(-1.0, 1e4),
    duration_s=st.one_of(st.just(0.0), st.floats(1e-12, 1e3)),
    args=st.dictionaries(st.just("bytes"), st.integers(0, 10**12)),
)


@given(st.lists(span_values, max_size=12))
def test_any_spans_give_a_valid_trace(spans):
    document = {"traceEvents": list(trace.chrome_events({"x": spans})), "displayTimeUnit": "ms", "otherData": {}}
    rows = check_schema(json.loads(json.dumps(document, allow_nan=False)))
    assert sum(map(len, rows.values())) == len(spans)


# --- The picture ------------------------------------------------------------------------------------------------------


def drawn_bars(axes):
    """Lane -> operation -> the (start, end, middle) of its bars, from the artists of a panel."""
    bars = defaultdict(lambda: defaultdict(list))
    for collection in axes.collections:
        lane, name = collection.get_gid().split(":")
        for path in collection.get_paths():
            (x0, y0), (x1, y1) = path.get_extents().get_points()
            bars[lane][name].append((x0, x1, (y0 + y1) / 2))
    return bars


def test_picture_has_a_row_for_each_lane_with_all_its_spans_and_its_busy_fraction():
    figure = figure_of({"ours": SPANS, "k=2": spans_of(timeline())}, title="20b")
    assert figure.get_suptitle() == "20b"
    panels = [axes for axes in figure.axes if axes.collections]
    assert [axes.get_title(loc="left") for axes in panels] == ["ours", "k=2"]
    for axes, spans in zip(panels, (SPANS, spans_of(timeline())), strict=True):
        lanes = lanes_of(spans)
        assert [label.get_text() for label in axes.get_yticklabels()] == list(lanes)
        bars = drawn_bars(axes)
        for row, (lane, members) in enumerate(lanes.items()):
            found = sorted((x0, x1) for each in bars[lane].values() for x0, x1, _ in each)
            wanted = sorted((span.start_s, span.end_s) for span in members)
            assert found == [pytest.approx(times) for times in wanted]
            for each in bars[lane].values():
                assert all(abs(middle - row) < 0.5 for _, _, middle in each), f"{lane} is not drawn in its row"
        margin = {text.get_position()[1]: text.get_text() for text in axes.texts}
        over = max(span.end_s for span in spans)
        assert len(margin) == len(lanes) - 1  # a bucket's release takes no time
        for row, members in enumerate(list(lanes.values())[:-1]):
            assert margin[row] == f"{busy_fraction(members, 0.0, over):.0%} busy"
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"forward", "states to device", "update on host"} <= legend


def test_png_is_written_whole(tmp_path):
    path = tmp_path / "lanes.png"
    trace.draw(path, {"ours": SPANS})
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert [file.name for file in tmp_path.iterdir()] == ["lanes.png"]


def test_missing_matplotlib_is_named_with_the_way_out(monkeypatch, tmp_path):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(trace.MissingPlotLibraryError, match="pip install matplotlib"):
        trace.draw(tmp_path / "x.png", {"ours": SPANS})
    assert not list(tmp_path.iterdir())


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="no span"):
        figure_of({"ours": []})


# --- Files ------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_there_stays_unless_asked_to_go(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="is there already"):
        write_chrome_trace(path, {"ours": SPANS})
    assert path.read_text() == "mine"
    write_chrome_trace(path, {"ours": SPANS}, overwrite=True)
    check_schema(json.loads(path.read_text()))


def test_failed_write_leaves_neither_the_file_nor_a_part_of_it(tmp_path):
    def write_half(temporary):
        temporary.write_text("half")
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), new_file(tmp_path / "x") as temporary:
        write_half(temporary)
    assert not list(tmp_path.iterdir())


def test_of_several_files_all_appear_or_none(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    paths[1].write_text("mine")
    with pytest.raises(FileExistsError, match="b is there already"), new_files(paths):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    with new_files(paths, overwrite=True) as temporaries:
        for temporary in temporaries:
            temporary.write_text("new")
        assert not paths[0].exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert [path.read_text() for path in paths] == ["new", "new"]


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_chrome_trace(tmp_path / "nowhere" / "trace.json", {"ours": SPANS})
