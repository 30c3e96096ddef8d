# SPDX-License-Identifier: Apache-2.0
"""Results as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["summary", "summary_of_stage"]


def summary_of_stage(name: str, stage: dict[str, Any]) -> str:
    """One stage, as soon as it is over."""
    lines = [f"== {name} ({stage['title']}): {stage['state']}, {stage.get('seconds', 0):.0f} s"]
    for check in stage.get("checks", ()):
        lines.append(f"   {'ok  ' if check['ok'] else 'FAIL'} {check['name']}")
        if not check["ok"]:
            lines.append(f"        {check['detail']}")
    lines += [f"   not made: {what}" for what in stage.get("not_made", ())]
    if "reason" in stage:
        lines.append(f"   {stage['reason']}")
    if "error" in stage:
        lines.append(f"   {stage['error']}")
    if stage["state"] in ("failed", "killed", "crashed") and stage.get("trace"):
        lines += [f"   | {line}" for line in stage["trace"].strip().splitlines()[-40:]]
    lines += [f"   note: {note}" for note in stage.get("notes", ())]
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> str:
    """The whole run."""
    lines = ["", "=" * 100]
    if results["dry_run"]:
        lines.append("DRY RUN WITHOUT A GPU: the figures are those of a stand-in and mean nothing.")
    stages = results["stages"]
    values = {name: stage.get("values", {}) for name, stage in stages.items()}
    lines += _machine(values.get("environment", {}))
    lines += _rates(values.get("rates", {}))
    lines += _step_time(values.get("step_time", {}))
    lines += _connections(values)
    verdict = results["verdict"]
    lines.append("")
    checks = sum(len(stage.get("checks", ())) for stage in stages.values())
    if verdict["correct"]:
        lines.append(f"all {checks} correctness checks hold")
    lines += [f"FAILED: {name}" for name in verdict["checks_that_fail"]]
    lines += [f"NOT CHECKED: {name}" for name in verdict["checks_not_made"]]
    lines += [f"stage that failed: {name}" for name in verdict["stages_that_failed"]]
    lines.append(f"{results['seconds']:.0f} s in all; exit status {verdict['exit_status']}")
    return "\n".join(lines)


def _machine(values: dict[str, Any]) -> Iterator[str]:
    if "cpu" not in values:
        return
    cpu, memory = values["cpu"], values["host_memory"]
    yield f"GPU: {values['gpu']['name']}   torch {values['software']['torch']}, Triton {values['software']['triton']}"
    yield f"CPU: {cpu['name']}, {cpu['allowed_cpus']} CPUs; host memory {memory['total_bytes'] / 2**30:.0f} GiB"


def _rates(values: dict[str, Any]) -> Iterator[str]:
    if "links_bytes_per_second" not in values:
        return
    yield ""
    links = values["links_bytes_per_second"]
    for direction in ("h2d", "d2h"):
        yield (
            f"{direction.upper()}: {links['alone'][direction] / 1e9:.1f} GB/s alone, "
            f"{links['together'][direction] / 1e9:.1f} GB/s with the other direction; two streams of it: "
            f"{values.get('two_streams_of_one_direction', {}).get(direction, {}).get('streams', 'not measured')}"
        )
    if "device_update" in values:
        yield f"update on the GPU: {values['device_update']['chosen']['parameters_per_second'] / 1e9:.1f} G P/s"
    if "host_update" in values:
        host = values["host_update"]
        yield (
            f"update on the CPU: {host['parameters_per_second_alone'] / 1e9:.2f} G P/s alone, "
            f"{host['parameters_per_second_beside_copies'] / 1e9:.2f} G P/s beside copies both ways"
        )
    yield f"page-locking: {values['page_locking']['seconds_per_gib']:.2f} s for a GiB"


def _step_time(values: dict[str, Any]) -> Iterator[str]:
    if not values.get("rows"):
        return
    yield ""
    rounds = len(values["rows"][0]["seconds"])
    yield f"step time, {values['setting']['parameters'] / 1e9:.3g}e9 parameters, medians of {rounds} rounds:"
    yield f"{'':44} {'ms':>9} {'G P/s':>8} {'times ours':>11} {'predicted ms':>13}"
    for row in sorted(values["rows"], key=lambda row: row["median_seconds"]):
        predicted = row["predicted_seconds"]
        yield (
            f"{row['name']:44} {row['median_seconds'] * 1e3:9.1f} {row['parameters_per_second'] / 1e9:8.3f} "
            f"{row['times_ours']:11.2f} {predicted * 1e3 if predicted else float('nan'):13.1f}"
        )
    for name, lanes in values.get("busy_fraction_of_lanes", {}).items():
        parts = ", ".join(f"{lane} {part:.0%}" for lane, part in lanes.items() if lane != "seconds")
        yield f"lanes in use, {name}: {parts}"


def _connections(values: dict[str, dict[str, Any]]) -> Iterator[str]:
    usual, one = (values.get(name, {}) for name in ("connections", "one_connection"))
    key = "median_seconds_of_gpu_share"
    if key not in usual or key not in one:
        return
    yield ""
    for share, seconds in usual[key].items():
        yield (
            f"GPU share {share}, {usual['parameters'] / 1e9:.2g}e9 parameters: {seconds * 1e3:.1f} ms, with "
            f"CUDA_DEVICE_MAX_CONNECTIONS=1 {one[key][share] * 1e3:.1f} ms"
        )
