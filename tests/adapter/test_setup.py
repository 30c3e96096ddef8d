# SPDX-License-Identifier: Apache-2.0
"""What is decided when an optimizer is built, from its options and the facts alone."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from megatron_dos.adapter import setup
from megatron_dos.adapter.setup import MOST_SUBGROUPS, Facts, choose, inject
from megatron_dos.device import CudaDevice, HostDevice
from megatron_dos.device.sim import SimDevice
from megatron_dos.options.options import AUTOMATIC_EARLY_SLOTS, DosOptions, UnsupportedOptionError
from megatron_dos.planning.machine import preset
from megatron_dos.program.partition import OwnedRange
from megatron_dos.program.schedule import HOST_SLOTS

ON_HOST = Facts(
    device=torch.device("cpu"),
    ranges=[OwnedRange(0, (0, 0), 0, 3000), OwnedRange(1, (0, 1), 0, 1000)],
    grad_bytes=4,
    param_bytes=2,
    make_device=lambda place: HostDevice(),
    has_gpu=False,
    gathers_early=False,
    can_send_early=False,
    threads=6,
    ranks=2,
    machine=lambda: pytest.fail("nothing is to be found"),
)
WITH_GPU = replace(
    ON_HOST, make_device=lambda place: SimDevice(seed=0), has_gpu=True, can_send_early=True, machine=lambda: None
)


def options(**given) -> DosOptions:
    return DosOptions(use_deep_optimizer_states=True, **given)


def test_without_a_gpu_everything_is_updated_in_place_on_the_host():
    chosen = choose(options(), ON_HOST)
    assert (chosen.engine.host_share, chosen.engine.host_slots, chosen.engine.early_slots) == (1, 0, 0)
    assert chosen.engine.threads == 6
    assert not chosen.finds_share
    assert not chosen.sends_early
    assert chosen.kernel is not None
    assert chosen.subgroups.numel == 4000


def test_with_a_gpu_the_share_is_found_and_grads_are_sent_early():
    chosen = choose(options(), WITH_GPU)
    assert chosen.finds_share
    assert chosen.engine.host_share == Fraction(1, 2)
    assert "nothing measured yet" in chosen.first.reason
    assert chosen.engine.host_slots == HOST_SLOTS
    assert (chosen.sends_early, chosen.engine.early_slots) == (True, AUTOMATIC_EARLY_SLOTS)


def test_a_calibrated_machine_says_which_share_to_begin_with():
    asked = []
    machine = lambda: asked.append(1) or preset("h200")  # noqa: E731
    chosen = choose(options(), replace(WITH_GPU, machine=machine))
    assert asked == [1]
    assert "calibrated machine" in chosen.first.reason
    assert chosen.engine.host_share == chosen.first.host_share != Fraction(1, 2)
    assert chosen.first.costs


@pytest.mark.parametrize(
    ("given", "host_share", "stride"),
    [({"dos_gpu_share": 0.25}, Fraction(3, 4), 0), ({"dos_update_stride": 3}, 1, 3), ({"dos_gpu_share": 1.0}, 0, 0)],
)
def test_a_share_or_stride_that_is_given_is_kept(given, host_share, stride):
    chosen = choose(options(**given), replace(WITH_GPU, machine=ON_HOST.machine))
    assert (chosen.engine.host_share, chosen.engine.stride, chosen.finds_share) == (host_share, stride, False)


@pytest.mark.parametrize(
    ("overlap", "can", "slots", "expected"),
    [("auto", True, 0, AUTOMATIC_EARLY_SLOTS), ("auto", False, 3, 0), ("on", False, 3, 3), ("off", True, 0, 0)],
)
def test_early_grads(overlap, can, slots, expected):
    given = options(dos_overlap_grad_d2h=overlap, dos_early_grad_slots=slots)
    assert choose(given, replace(WITH_GPU, can_send_early=can)).engine.early_slots == expected
    assert choose(given, replace(ON_HOST, can_send_early=can)).engine.early_slots == 0  # nowhere to send them


def test_what_is_given_reaches_the_engine():
    given = options(dos_cpu_threads=2, dos_grad_transfer="model", dos_resident_share=0.5, dos_subgroup_size=1000)
    chosen = choose(given, replace(WITH_GPU, gathers_early=True))
    engine = chosen.engine
    assert (engine.threads, engine.grads_as_fp32, engine.resident_share) == (2, False, Fraction(1, 2))
    assert engine.last_bucket_first
    assert chosen.gathers_early
    assert len(chosen.subgroups.subgroups) == 4


def test_a_rank_that_owns_nothing_needs_no_kernel_and_asks_for_no_machine():
    chosen = choose(options(), replace(WITH_GPU, ranges=[], machine=ON_HOST.machine))
    assert chosen.kernel is None
    assert chosen.subgroups.subgroups == ()


def test_too_many_subgroups_are_refused_with_a_size_that_is_not():
    much = replace(ON_HOST, ranges=[OwnedRange(0, (0, 0), 0, 100 * MOST_SUBGROUPS)])
    with pytest.raises(UnsupportedOptionError, match=r"--dos-subgroup-size 64 cuts .* Give at least 100, or 0"):
        choose(options(dos_subgroup_size=64), much)
    choose(options(dos_subgroup_size=100), much)


def test_injected_facts_have_to_be_facts(monkeypatch):
    monkeypatch.setattr(setup, "_injected", {})
    inject(has_gpu=True, make_device=CudaDevice)
    assert setup._injected == {"has_gpu": True, "make_device": CudaDevice}
    with pytest.raises(TypeError, match="no facts of an optimizer: gpus"):
        inject(gpus=8)
