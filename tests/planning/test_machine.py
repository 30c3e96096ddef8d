# SPDX-License-Identifier: Apache-2.0
"""Machine descriptions: the presets are sound and sourced, files round-trip, and errors name file and key."""

from __future__ import annotations

import configparser
import json
from dataclasses import replace
from fnmatch import fnmatch

import pytest
from repository import ROOT

from megatron_dos.planning import machine as machines
from megatron_dos.planning.machine import Machine, MachineError, load, preset, preset_names
from megatron_dos.planning.workload import FUSED_PASS


def test_the_documented_presets_exist():
    assert preset_names() == ("a100-pcie4", "gh200", "h100-pcie5", "h200", "rtx4090")


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_physically_possible_and_says_where_each_value_comes_from(name):
    found = preset(name)
    assert found.name == name
    assert not found.fingerprint, "a preset is no measured machine"
    assert 0 < found.h2d_together <= found.h2d_alone
    assert 0 < found.d2h_together <= found.d2h_alone
    assert found.h2d_pageable < found.h2d_alone
    # Neither a CPU nor a link moves more of host memory than that gives.
    assert found.cpu_update_max * FUSED_PASS <= 1.001 * found.dram
    assert found.h2d_together + found.d2h_together <= found.dram
    assert found.cpu_update_per_core <= found.cpu_update_max <= found.cores * found.cpu_update_per_core
    # A GPU updates from its own memory, faster than any link brings states.
    assert found.gpu_update > found.h2d_alone / 12
    told = ("data sheet", "published", "estimate", "measured", "fitted", "as h100-pcie5", "dram / 30", "a workstation")
    assert all(any(word in str(source) for word in told) for source in found.sources.values())


def test_presets_are_installed_with_the_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]["megatron_dos"].split()
    for name in preset_names():
        assert any(fnmatch(f"machines/{name}.json", pattern) for pattern in patterns)


def test_a_machine_survives_being_written_and_read(tmp_path):
    found = replace(preset("h200"), name="node7", fingerprint="abc", dram=1.5e11)
    (tmp_path / "node7.json").write_text(found.as_json())
    assert load(tmp_path / "node7.json") == found
    assert load("h200") == preset("h200")


def test_threads_share_what_all_cores_reach_together():
    found = replace(preset("h100-pcie5"), cpu_update_per_core=0.5e9, cpu_update_max=8e9)
    assert found.cpu_update(threads=2, ranks=4) == 1e9
    assert found.cpu_update(threads=24, ranks=4) == 2e9
    assert found.cpu_update(threads=24, ranks=1) == 8e9


def text_with(**changes) -> str:
    values = json.loads(preset("gh200").as_json())
    for name, value in changes.items():
        if value is KeyError:
            del values[name]
        else:
            values[name] = value
    return json.dumps(values)


def sources_with(**changes) -> dict[str, str]:
    sources = {name: str(source) for name, source in preset("gh200").sources.items()}
    return {name: text for name, text in {**sources, **changes}.items() if text is not KeyError}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"m\.json: not JSON"),
        ("[]", r"m\.json: not a JSON object"),
        ("[" * 100_000, r"m\.json: not a machine: it is nested too deeply"),
        (text_with(dram=KeyError), r"m\.json: no dram"),
        (text_with(name=KeyError), r"m\.json: no name"),
        (text_with(name=3), r"m\.json: name is 3; it takes a text"),
        (text_with(dramm=1.0), r"m\.json: unknown key dramm; known are .*dram"),
        (text_with(dram="much"), r"m\.json: dram is 'much'; it takes a number"),
        (text_with(dram=True), r"m\.json: dram is True; it takes a number"),
        (text_with(dram=0), r"m\.json: dram is 0; it is finite and positive"),
        (text_with(h2d_alone=float("inf")), r"m\.json: h2d_alone is inf; it is finite and positive"),
        (text_with(copy_latency=-1), r"m\.json: copy_latency is -1; it is finite and at least 0"),
        (text_with(dram=1e-300), r"m\.json: dram is 1e-300; it lies between 1e-12 and 1e\+24"),
        (text_with(cpu_latency=1e300), r"m\.json: cpu_latency is 1e\+300; it lies between"),
        (text_with(cores=1.5), r"m\.json: cores is 1.5; it is a whole number"),
        (text_with(sources=[]), r"m\.json: sources maps each value's name"),
        (text_with(sources=sources_with(dram=KeyError)), r"m\.json: sources says nothing about dram"),
        (text_with(sources=sources_with(color="red")), r"m\.json: sources names color, which is no value"),
    ],
)
def test_a_file_that_describes_no_machine_is_refused_by_file_and_key(tmp_path, text, message):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(MachineError, match=message):
        load(path)


def test_an_unknown_name_lists_what_there_is(tmp_path):
    with pytest.raises(MachineError, match=r"neither a readable file .* nor one of a100-pcie4, gh200"):
        load(tmp_path / "h100")
    with pytest.raises(MachineError, match="no machine is called 'h100': give one of a100-pcie4"):
        preset("h100")


def test_a_machine_made_in_code_is_checked_like_a_file():
    with pytest.raises(MachineError, match="gh200: dram is -1"):
        replace(preset("gh200"), dram=-1)
    with pytest.raises(MachineError, match="sources says nothing about gpus"):
        Machine(**{**json.loads(preset("gh200").as_json()), "sources": {}})
    latencies_left_out = text_with(copy_latency=KeyError, cpu_latency=KeyError)
    assert machines.parse(latencies_left_out, "here").copy_latency == 0
