# SPDX-License-Identifier: Apache-2.0
"""`megatron-dos plan`: whether a job fits a machine, what each way to update takes there, and what would help."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_dos.commands import CommandError
from megatron_dos.commands.megatron_flags import add_layout_flags, launch_flags, layout_overrides, read_job
from megatron_dos.commands.models import KNOWN_MODELS
from megatron_dos.commands.scenario import Scenario, add_machine_flag, iteration_spans, scenario_of
from megatron_dos.commands.text import short, table, wrapped
from megatron_dos.planning.clock import Queues
from megatron_dos.planning.systems import OURS, RIVALS
from megatron_dos.words import gib, plural

if TYPE_CHECKING:
    from megatron_dos.planning.choice import Choice
    from megatron_dos.planning.workload import Memory
    from megatron_dos.program.timeline import Timeline

__all__ = ["add", "run"]

_SPARE = 0.1
"""Part of a GPU's memory that no advice fills: CUDA's own, communication buffers, fragments. An estimate."""
_WORTH_IT = 0.95
"""Advice is given only if it makes the update shorter than this part of its time."""

_HELP = """\
Show the cost of training a model with deep optimizer states on a machine: parameters, memory of each rank with and
without them, seconds of the update and of an iteration for each way to update, the best share, its limit and possible
improvements. Nothing runs on a GPU: times come from the virtual clock with the machine's rates, and leave out the
communication of parallel groups; activations are an estimate.

--model takes a name, or a file of Megatron's flags: a shell script, plain text or YAML (needs PyYAML). Its --dos-*
flags are honoured. Flags that training would refuse are reported with a remedy, and ignored flags are listed. Megatron
and --dos-* flags given on this command line override the file's.

{models}"""

_EPILOG = """\
examples:
  megatron-dos plan --model 13b --gpus 8 --tensor-parallel 2 --machine h100-pcie5
  megatron-dos plan --model train.sh --gpus 32 --machine node.json --json
  megatron-dos plan --model llama3-70b --gpus 64 --tensor-parallel 8 --seq-length 4096 --micro-batch-size 2"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="memory, step time and best share of a model on a machine",
        description=_HELP.format(models=wrapped(f"Known models: {', '.join(KNOWN_MODELS)}", indent="")),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, metavar="NAME|FILE", help="a known model, or a file of flags")
    add_machine_flag(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_layout_flags(parser, argparse.SUPPRESS)
    parser.set_defaults(run=run, takes_more=True)


def run(options: argparse.Namespace) -> int:
    scenario = scenario_of(read_job(options.model, [*layout_overrides(options), *options.more]), options)
    plan = _plan(scenario)
    print(json.dumps(plan, indent=1) if options.json else _page(scenario, plan))
    return 0


@dataclass(frozen=True)
class _Row:
    """A way to update, and what it takes: seconds, bytes at most on a GPU and on the node, and whether that fits."""

    name: str
    update_s: float
    iteration_s: float
    parameters_per_second: float
    resident_share: float
    gpu_bytes: int
    host_bytes: int
    fits: bool


def _plan(scenario: Scenario) -> dict[str, Any]:
    from megatron_dos.planning import rivals
    from megatron_dos.planning.choice import choose
    from megatron_dos.planning.workload import MemoryFitError

    machine, work, share = scenario.machine, scenario.work, Fraction(scenario.resident_share)
    free = machine.gpu_memory - scenario.params - scenario.grads
    if free <= 0:
        raise CommandError(
            f"{scenario.name}: params and gradients of a rank need {gib(scenario.params + scenario.grads)}, and a GPU "
            f"of {machine.name} has {gib(machine.gpu_memory)}: divide the model, with more --tensor-parallel or "
            f"--pipeline-parallel{_or_narrower_grads(scenario)}"
        )
    try:
        choice = choose(
            machine,
            work,
            free_gpu_memory=free,
            activations=scenario.activations + _SPARE * machine.gpu_memory,
            resident_share=share,
            **scenario.asked,
        )
    except MemoryFitError as error:
        way_out = error.shortage.text(flags_begin="--")  # with the flags of this command
        raise CommandError(f"{scenario.name} on {plural(scenario.known_job.layout.gpus, 'GPU')}: {way_out}") from error
    memory = choice.memory
    kept = scenario.params + scenario.grads

    def on_gpu_at_most(memory: Memory) -> int:
        return kept + memory.gpu_resident + max(scenario.activations, memory.gpu_slots)

    with_dos = on_gpu_at_most(memory)
    without = kept + scenario.states + scenario.activations
    systems = []
    for system, timeline in (
        (OURS, _our_step(scenario, choice, free)),
        *((rival, rivals.step_of(rival, machine, work, share)) for rival in RIVALS.values()),
    ):
        seconds = max(span.end_s for span in iteration_spans(scenario, system.design, timeline))
        rate = work.parameters / timeline.makespan
        needed = rivals.memory_of(system, work, timeline)
        gpu, host = on_gpu_at_most(needed), needed.host
        fits = gpu <= machine.gpu_memory and host <= machine.host_memory
        systems.append(_Row(system.name, timeline.makespan, seconds, rate, float(share), gpu, host, fits))
    on_gpu = work.parameters / machine.gpu_update
    passes = scenario.passes.forward + scenario.passes.backward
    rate, fits = machine.gpu_update, without <= machine.gpu_memory
    advised = 0.0 if fits else _resident_advice(scenario, choice)
    systems.append(_Row("states on the GPU: stock Megatron", on_gpu, passes + on_gpu, rate, 1.0, without, 0, fits))
    notes = list(scenario.notes)
    if fits:
        notes.append("the states fit on the GPUs: without deep optimizer states Megatron is faster here")
    layout, training = scenario.known_job.layout, scenario.known_job.training
    batch = training.micro_batch * training.micro_batches * layout.data
    return {
        "model": {
            "name": scenario.name,
            "source": scenario.known_job.source,
            "parameters": scenario.parameters,
            **asdict(scenario.known_job.shape),
        },
        "layout": {**asdict(layout), "data": layout.data, "ranks_per_node": work.ranks},
        "training": {"global_batch": batch, **asdict(training)},
        "machine": {
            "name": machine.name,
            "fingerprint": machine.fingerprint,
            "gpu_values_of_preset": machine.preset_of_gpu,
        },
        "queues": work.queues.value,
        "rank": {
            "parameters": scenario.stage.parameters,
            "owned_parameters": scenario.stage.owned,
            "subgroups": len(work.subgroups),
        },
        "gpu_memory_bytes": {
            "there": machine.gpu_memory,
            "params": scenario.params,
            "grads": scenario.grads,
            "activations": scenario.activations,
            "states_without": scenario.states,
            "resident_states": memory.gpu_resident,
            "slots_during_the_step": memory.gpu_slots,
            "without": without,
            "with": with_dos,
        },
        "host_memory_bytes": {
            "there": machine.host_memory,
            "states": memory.host_states,
            "slots": memory.host_slots,
            "with": memory.host,
        },
        "choice": {
            "gpu_share": float(choice.streamed_share / (1 - choice.resident_share))
            if choice.resident_share < 1
            else 0.0,
            "host_share": float(choice.host_share),
            "streamed_share": float(choice.streamed_share),
            "resident_share": float(choice.resident_share),
            "threads": choice.threads,
            "step_seconds": choice.step_seconds,
            "busy_seconds": dict(choice.lanes),
            "limited_by": choice.limiting,
            "step_seconds_with": {more.value: seconds for more, seconds in choice.helps.items()},
            "reason": choice.reason,
        },
        "advised_resident_share": advised,
        "launch": _launch(scenario, choice, advised),
        "passes_seconds": asdict(scenario.passes),
        "systems": [asdict(system) for system in systems],
        "notes": notes,
    }


def _or_narrower_grads(scenario: Scenario) -> str:
    """A further remedy for params and grads that do not fit, if there is one."""
    way_out = scenario.known_job.training.narrower_grads
    would_fit = scenario.params + scenario.grads / 2 < scenario.machine.gpu_memory
    return f", or give {way_out}" if way_out and would_fit else ""


def _our_step(scenario: Scenario, choice: Choice, free_gpu_memory: float) -> Timeline:
    from megatron_dos.planning import rivals
    from megatron_dos.planning.model import on_the_clock, program_for

    machine, work = scenario.machine, scenario.work
    if not scenario.asked:
        return rivals.ours(machine, work, Fraction(scenario.resident_share), free_gpu_memory)
    program = program_for(work, choice.host_share, choice.resident_share)
    return on_the_clock(machine, replace(work, threads=choice.threads), program)


def _launch(scenario: Scenario, choice: Choice, advised: float) -> list[str]:
    """The flags of this plan that the launch does not have yet. The share of the GPU is left to the run.

    `advised` is the part of the states to keep on the GPU; 0 for what was given.
    """
    settings = replace(scenario.settings, use_deep_optimizer_states=True)
    overlaps = scenario.work.early_grads and choice.host_share > 0
    if overlaps:
        sent = round(choice.host_share * len(scenario.work.subgroups))
        slots = max(sent, settings.dos_early_grad_slots)
        unwilling = ("off",) if scenario.work.queues is Queues.EACH else ("off", "auto")  # auto is off with one queue
        early = "on" if settings.dos_overlap_grad_d2h in unwilling else settings.dos_overlap_grad_d2h
        settings = replace(settings, dos_early_grad_slots=slots, dos_overlap_grad_d2h=early)
    if advised:
        settings = replace(settings, dos_resident_share=advised)
    return [flag for flag in launch_flags(settings, overlaps=overlaps) if flag not in scenario.known_job.launch]


def _resident_advice(scenario: Scenario, choice: Choice) -> float:
    """The part of the states that is better kept on the GPU, in hundredths; 0 where there is none, or it was given."""
    share = math.floor(100 * choice.most_resident) / 100
    if scenario.resident_share or not share:
        return 0.0
    seconds = min(seconds for more, seconds in choice.helps.items() if more.is_resident)
    return share if seconds < _WORTH_IT * choice.step_seconds else 0.0


def _page(scenario: Scenario, plan: dict[str, Any]) -> str:
    layout, choice, training = scenario.known_job.layout, plan["choice"], plan["training"]
    groups = [
        f"{name} {size}"
        for name, size in (
            ("data", layout.data),
            ("tensor", layout.tensor),
            ("pipeline", layout.pipeline),
            ("context", layout.context),
            ("expert", layout.expert),
        )
        if size > 1 or name == "data"
    ]
    parts = [
        f"{scenario.name}: {scenario.parameters:,} parameters ({scenario.known_job.source})\n"
        f"{plural(layout.gpus, 'GPU')}, {plan['layout']['ranks_per_node']} a node; parallel: {', '.join(groups)}\n"
        f"global batch {training['global_batch']} x sequence {training['sequence']}, micro-batches "
        f"{training['micro_batches']} of {training['micro_batch']}, recompute {training['recompute']}, gradients of "
        f"{8 * training['grad_bytes']} bits\n"
        f"machine: {scenario.machine_name}\n"
        f"each rank: {short(scenario.stage.parameters)} parameters, states of {short(scenario.stage.owned)}, in "
        f"{plural(plan['rank']['subgroups'], 'subgroup')}",
        _memory_table(plan),
        _system_table(plan),
        f"{wrapped('best: ' + choice['reason'])}\n"
        f"limited by: {choice['limited_by']}\n"
        + "\n".join(
            f"  with {name}: {_seconds(value)} ({value / choice['step_seconds'] - 1:+.0%})"
            for name, value in choice["step_seconds_with"].items()
        ),
    ]
    parts += [wrapped(f"note: {note}") for note in plan["notes"]]
    parts.append(_what_to_type(plan))
    return "\n\n".join(parts)


def _what_to_type(plan: dict[str, Any]) -> str:
    flags = plan["launch"]
    if not flags:
        return "your launch has all the flags of this plan"
    start = "add to your launch" if not plan["systems"][-1]["fits"] else "for deep optimizer states all the same, add"
    text = wrapped(f"{start}: {' '.join(flags)}")
    if plan["advised_resident_share"]:
        text += "\n" + wrapped(
            "  --dos-resident-share fills the room left by the estimate of activations: lower it if memory runs out"
        )
    return text


def _memory_table(plan: dict[str, Any]) -> str:
    gpu, host = plan["gpu_memory_bytes"], plan["host_memory_bytes"]
    rows = [
        ["params", gib(gpu["params"]), gib(gpu["params"])],
        ["grads", gib(gpu["grads"]), gib(gpu["grads"])],
        ["states", gib(gpu["states_without"]), gib(gpu["resident_states"])],
        ["activations (estimate)", gib(gpu["activations"]), gib(gpu["activations"])],
        ["slots, while there are no activations", "-", gib(gpu["slots_during_the_step"])],
        [f"at most, of {gib(gpu['there'])}", _fitting(gpu, "without"), _fitting(gpu, "with")],
        ["host memory of a node: states", "-", gib(host["states"])],
        ["host memory of a node: slots", "-", gib(host["slots"])],
        [f"together, of {gib(host['there'])}", "-", gib(host["with"])],
    ]
    return table(["memory of each GPU", "without", "with deep optimizer states"], rows)


def _fitting(gpu: dict[str, Any], which: str) -> str:
    return gib(gpu[which]) + ("" if gpu[which] <= gpu["there"] else " DOES NOT FIT")


def _system_table(plan: dict[str, Any]) -> str:
    ours = plan["systems"][0]
    rows = [
        [
            system["name"],
            _seconds(system["update_s"]),
            f"{system['parameters_per_second'] / 1e9:.2f}",
            _seconds(system["iteration_s"]),
            f"{system['iteration_s'] / ours['iteration_s']:.2f}",
            "yes" if system["fits"] else "no",
        ]
        for system in plan["systems"]
    ]
    return table(["way to update", "update", "G params/s a rank", "iteration", "of ours", "fits"], rows)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
