# SPDX-License-Identifier: Apache-2.0
"""The software GPU: stock torch for CUDA takes it for a GPU, it orders what CUDA orders and nothing else, and the
engine has the bits of the sequential update on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from repository import ROOT

import software_gpu
from software_gpu.mutations import MUTATIONS, OF_TRAININGS, PACKAGE, plant, verdict
from software_gpu.server import Server

pytestmark = [
    pytest.mark.skipif(not software_gpu.is_possible(), reason="torch is no CUDA build; the sim device covers programs"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(software_gpu.build(ROOT / ".cache" / "software-gpu")) as running:
        yield running


def result(server: Server, check: str, **environment: str) -> Any:
    outcome = server.run(check, **environment)
    assert outcome.code == 0, outcome.log[-3000:]
    return outcome.result


def test_torch_finds_a_gpu(server):
    found = result(server, "torch_believes", SOFTWARE_GPU_MEMORY=str(1 << 30))
    assert found == {"available": True, "name": "Software GPU", "pinned": [True, False], "memory": 1 << 30}


def test_a_network_trains_on_it_as_on_the_cpu(server):
    found = result(server, "training")
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-5)
    assert found["drawn"][0] == found["drawn"][1]


def test_a_missing_wait_shows_and_a_wait_holds(server):
    found = result(server, "missing_waits", SOFTWARE_GPU_DELAY_US="2000")
    assert found["with"] == 0
    assert found["without"] > 0


def test_an_event_that_is_recorded_again_holds_up_nobody_who_waits_for_the_first(server):
    found = result(server, "events", SOFTWARE_GPU_DELAY_US="0")
    assert found["first only"]
    assert found["milliseconds between"] > 100


def test_pageable_copies_are_counted(server):
    assert result(server, "pageable_copies") == [[1, 0, 1, 0], [0, 1, 0, 1]]


def test_a_touch_of_device_memory_by_the_host_is_a_crash_that_names_the_place(server):
    outcome = server.run("host_touch")
    assert outcome.code == -11
    assert "host_touch" in outcome.log


def test_calls_fail_on_demand(server):
    found = result(server, "failures")
    assert found["register"] == [2, 0]
    assert found["pending"] == 2
    assert "illegal memory access" in found["copy"]
    assert found["malloc"] == "taken after a second try"


def test_page_locking_fails_as_in_cuda(server):
    found, ranges = result(server, "registering")
    already = "CUDA error: part or all of the requested memory range is already mapped"
    unknown = "CUDA error: pointer does not correspond to a registered memory region"
    assert found == {
        "anew": [0, ""],
        "again": [712, already],
        "a part": [712, already],
        "what lies behind": [0, ""],
        "undo": [0, ""],
        "undo again": [713, unknown],
        "undo in the middle": [713, unknown],
        "undo the last": [0, ""],
    }
    assert ranges == 0


def test_the_default_stream_and_blocking_streams_wait_for_each_other(server):
    assert result(server, "legacy_stream", SOFTWARE_GPU_DELAY_US="0") == [
        "blocking after default",
        "default after blocking",
    ]


def test_memory_that_is_used_after_it_was_freed_is_refused_or_nan(server):
    found = result(server, "use_after_free", SOFTWARE_GPU_DELAY_US="0")
    assert found["copies"] == [0, 1]
    assert found["past the end"] == 1
    assert found["frees"] == [0, 1]
    assert found["not recorded"] == [True, False]
    assert found["recorded"] == [False, True]


def test_what_is_read_too_early_is_not_right_by_chance(server):
    assert result(server, "stale_memory", SOFTWARE_GPU_DELAY_US="0") == [True, False, False, False]


def test_handles_for_other_processes_are_refused(server):
    assert result(server, "ipc") == ["CUDA error: operation not supported"] * 2


def test_a_slab_that_cannot_be_page_locked_leaves_no_error_behind(server):
    found = result(server, "slabs")
    assert "could not page-lock" in found.pop("raised")
    assert found == {"pending": "", "pinned": True, "released": 1, "in a child": 0}


def test_the_device_keeps_each_of_its_promises_behind_gates(server):
    found = result(server, "gated", SOFTWARE_GPU_DELAY_US="0")
    assert len(found) == 15
    assert not any(found.values()), found


def test_staging_memory_can_be_used_again_in_the_order_of_the_caller(server):
    found = result(server, "slots", SOFTWARE_GPU_DELAY_US="0")
    assert found == {"the same memory": True, "of the caller's stream": True, "differences": []}


def test_states_are_read_when_they_have_come_back(server):
    assert result(server, "reading", SOFTWARE_GPU_DELAY_US="0") == []


def test_no_copy_of_a_step_blocks_the_host(server):
    assert set(result(server, "host_waits").values()) == {0}


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("synchronize misses STATES_D2H", "synchronize_waits_for_every_stream"),
        ("begin does not wait for the caller", "begin_waits_for_the_caller"),
        ("join does not wait", "join_holds_up_the_caller"),
        ("slots are of another stream", "slots"),
        ("operations wait for no event", "an_operation_waits_for_its_dependencies"),
        ("grads are sent blocking", "host_waits"),
        ("host memory is not page-locked", "host_waits"),
    ],
)
def test_a_planted_fault_shows(server, fault, shown):
    found = plant(server, fault)
    assert found == shown
    assert verdict(fault, found) == "seen"


def test_every_fault_can_be_planted(server):
    assert result(server, "mutations") == len(MUTATIONS)
    for mutation in OF_TRAININGS.values():
        assert (PACKAGE / mutation.file).read_text().count(mutation.old) == 1


def test_a_forked_child_cannot_use_it(server):
    assert result(server, "fork") == 0


@pytest.mark.parametrize(("queues", "waited"), [("", False), ("engines", True), ("one", True)])
def test_queues_of_the_hardware_hold_up_what_comes_behind(server, queues, waited):
    assert result(server, "one_queue", SOFTWARE_GPU_QUEUES=queues, SOFTWARE_GPU_DELAY_US="0") == waited


@pytest.mark.parametrize(("seed", "queues"), [(1, ""), (2, "one"), (3, "engines")])
def test_the_engine_has_the_bits_of_the_sequential_update(server, seed, queues):
    settings = {"SOFTWARE_GPU_SEED": str(seed), "SOFTWARE_GPU_QUEUES": queues, "SOFTWARE_GPU_DELAY_US": "50"}
    found = result(server, "engine", **settings)
    assert found == {"steps": 80, "differences": [], "pageable copies": 0}
