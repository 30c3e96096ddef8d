# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/performance.md: what the performance model says of the published claims.

`make reproduce` runs it; a test fails while the page is not what it would write. Every number comes from the virtual
clock on the constants of scripts/reproduce.py, or is one of the published ones of scripts/published.csv.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import reproduce
from reproduce import RANKS, TESTBEDS, TOKENS

from megatron_dos.planning import rivals
from megatron_dos.planning.choice import choose
from megatron_dos.planning.clock import Queues
from megatron_dos.planning.machine import Machine, preset, preset_names
from megatron_dos.planning.model import clock_optimum, clocked
from megatron_dos.planning.systems import OURS, RIVALS, Design
from megatron_dos.planning.workload import FUSED_PASS, Workload
from megatron_dos.program.partition import BYTES_PER_PARAMETER
from megatron_dos.program.schedule import Placement
from megatron_dos.program.timeline import Timeline

PAGE = reproduce.ROOT / "docs" / "performance.md"

NODE = TESTBEDS["4xH100"]
SYSTEMS = {OURS.name: OURS, **RIVALS}
MODELS = {"7B": 5.949e9, "8.3B": 9.143e9, "10B": 9.919e9, "13B": 11.316e9, "20B": 15.327e9}
PUBLISHED_SUBGROUP = reproduce.SUBGROUP
# The published program has three slots of a subgroup on the GPU; ours may take as much for slots and resident states.
PUBLISHED_SLOTS = 3 * BYTES_PER_PARAMETER * PUBLISHED_SUBGROUP
ASKED_HOST_SHARE = Fraction(2, 5)
"""CPU share at which steps with one hardware queue are compared."""


def published_step(label: str, static: float, variant: str, what: str = "step") -> float:
    """A published time, a median of the logs."""
    for row in reproduce.rows():
        if (row.node, row.label, row.static, row.variant) == ("4xH100", label, static, variant):
            value = getattr(row, what)
            if value is not None and row.stride in (0, 2):
                return value
    raise KeyError(f"no published {what} of {label}, {static}, {variant}")


def theirs(parameters: float, ranks: int = RANKS) -> Workload:
    """The work of a rank in the published configuration."""
    return Workload(parameters=round(parameters / RANKS), ranks=ranks, subgroup=PUBLISHED_SUBGROUP, grad_bytes=4)


def our_work(parameters: float, ranks: int = RANKS) -> Workload:
    """The same work as this package would do it: subgroups of the automatic size, bf16 grads sent as they are."""
    return Workload(parameters=round(parameters / RANKS), ranks=ranks, grad_bytes=2)


@cache
def step_of(system: str, machine: Machine, work: Workload, static: Fraction = Fraction(0)) -> Timeline:
    """The step of a rival by its name in `RIVALS`, or of "ours"."""
    return rivals.step_of(SYSTEMS[system], machine, work, static)


def rate(work: Workload, timeline: Timeline) -> float:
    """G parameters a second that the node updates."""
    return work.parameters * work.ranks / timeline.makespan / 1e9


def iteration(system: str, label: str, static: Fraction = Fraction(0), blocking: bool = False) -> float:
    """Seconds of an iteration on the H100 node. `blocking` says how grads are sent."""
    work = our_work(MODELS[label]) if system == "ours" else theirs(MODELS[label])
    interleaved = SYSTEMS[system].design is Design.PUBLISHED
    timeline = step_of(system, NODE.machine, work, static)
    flops = 2 * MODELS[label] * TOKENS
    return rivals.iteration(
        NODE.machine, work, timeline, flops, NODE.overheads, blocking=blocking, interleaved=interleaved
    ).seconds


def equal_memory(machine: Machine, work: Workload) -> Fraction:
    """The resident share that fits beside our slots into what the published program's slots take."""
    return choose(machine, work, free_gpu_memory=PUBLISHED_SLOTS, free_host_memory=math.inf).resident_share


def moved(timeline: Timeline, work: Workload) -> float:
    """GB/s of the states that one rank copies each way during the step."""
    streamed = sum(
        numel
        for numel, place in zip(work.subgroups, timeline.program.placements, strict=True)
        if place is Placement.STREAMED
    )
    return BYTES_PER_PARAMETER * streamed / timeline.makespan / 1e9


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def accuracy() -> str:
    groups = reproduce.groups(reproduce.comparisons())
    body = [(name, str(e.count), f"{e.median:.1%}", f"{e.worst:.1%}") for name, e in groups.items()]
    return table(("what", "times", "median error", "worst error"), body)


def systems() -> str:
    """Steps of the 20B model on the H100 node, nothing resident but in the last row."""
    machine, work, mine = NODE.machine, theirs(MODELS["20B"]), our_work(MODELS["20B"])
    measured = MODELS["20B"] / published_step("20B", 0.0, "interleaved", "step") / 1e9
    body = []

    def add(name: str, timeline: Timeline, of: Workload) -> None:
        body.append(
            (
                name,
                f"{timeline.makespan:.3f}",
                f"{rate(of, timeline):.1f}",
                f"{rate(of, timeline) / rate(work, step_of('published, k=2', machine, work)):.2f} x",
                f"{rate(of, timeline) / measured:.2f} x",
                f"{moved(timeline, of):.0f}",
            )
        )

    for name in RIVALS:
        add(name, step_of(name, machine, work), work)
    add("ours", step_of("ours", machine, mine), mine)
    share = equal_memory(machine, mine)
    add(f"ours, {share_text(share)} resident", step_of("ours", machine, mine, share), mine)
    header = ("system", "step s", "G params/s", "of simulated k=2", "of measured k=2", "states GB/s each way")
    return table(header, body)


def share_text(share: Fraction) -> str:
    return f"{float(share):.1%}"


def claims() -> str:
    """The published claims, one a row."""
    zero, fifth, half = Fraction(0), Fraction(1, 5), Fraction(1, 2)
    work, mine = theirs(MODELS["20B"]), our_work(MODELS["20B"])
    machine = NODE.machine
    offload, k2 = step_of("full offload", machine, work), step_of("published, k=2", machine, work)
    our_share = equal_memory(machine, mine)

    def times(slow: float, fast: float) -> str:
        return f"{slow / fast:.2f} x"

    def measured(static: float, variant: str) -> float:
        return published_step("20B", static, variant, "iteration")

    def iterations(name: str, claim: str, static: float, part: Fraction) -> tuple[str, ...]:
        base = {blocking: iteration("full offload", "20B", part, blocking) for blocking in (True, False)}
        published, own = iteration("published, k=2", "20B", part), iteration("ours", "20B", part)
        return (
            name,
            claim,
            times(measured(static, "blocking_grads"), measured(static, "interleaved")),
            f"{times(base[True], published)}; {times(base[False], published)} of async",
            times(base[True], own),
            times(base[False], own),
        )

    body = [
        iterations("faster iterations than full offload", "2.5 x", 0.0, zero),
        iterations("than a static split, 20 % on the GPU", "2.3 x", 0.2, fifth),
        (
            "update rate over full offload",
            "+70 %",
            f"{published_step('20B', 0.0, 'async_grads') / published_step('20B', 0.0, 'interleaved') - 1:+.0%}",
            f"{offload.makespan / k2.makespan - 1:+.0%}",
            *2 * (f"{rate(mine, step_of('ours', machine, mine)) / rate(work, offload) - 1:+.0%}",),
        ),
        (
            "nothing resident against a static split with 50 % of the states on the GPU",
            "faster with 40 % less GPU memory",
            times(measured(0.5, "blocking_grads"), measured(0.0, "interleaved")),
            f"{times(iteration('full offload', '20B', half, True), iteration('published, k=2', '20B'))}; "
            f"{times(iteration('full offload', '20B', half), iteration('published, k=2', '20B'))} of async",
            times(iteration("full offload", "20B", half, True), iteration("ours", "20B")),
            times(iteration("full offload", "20B", half), iteration("ours", "20B")),
        ),
        (
            "links in use during the update, GB/s each way",
            "both directions busy",
            "19",
            f"{moved(k2, work):.0f}",
            *2 * (f"{moved(step_of('ours', machine, mine, our_share), mine):.0f}",),
        ),
    ]
    header = (
        "claim",
        "published",
        "in the logs",
        "model of the published system",
        "ours, blocking baseline",
        "ours, async",
    )
    return table(header, body)


def growth() -> str:
    """Update rates by model size and by ranks of the node."""
    body = []
    for label, parameters in MODELS.items():
        work, mine = theirs(parameters), our_work(parameters)
        body.append((f"{label}, {RANKS} ranks", *_rates(NODE.machine, work, mine), *_iterations(label)))
    for ranks in (1, 2, 8):
        machine = replace(NODE.machine, gpus=ranks)
        work, mine = (make(MODELS["20B"], ranks) for make in (theirs, our_work))
        plural = "s" if ranks > 1 else ""
        body.append(
            (f"{work.parameters / 1e9:.1f}B a rank, {ranks} rank{plural}", *_rates(machine, work, mine), "-", "-")
        )
    header = (
        *("model", "full offload, G params/s", "k=2", "ours", "ours over full offload", "over k=2"),
        *("iteration: ours over blocking", "over async"),
    )
    return table(header, body)


def _rates(machine: Machine, work: Workload, mine: Workload) -> tuple[str, ...]:
    base, k2 = (rate(work, step_of(name, machine, work)) for name in ("full offload", "published, k=2"))
    own = rate(mine, step_of("ours", machine, mine))
    return f"{base:.1f}", f"{k2:.1f}", f"{own:.1f}", f"{own / base:.2f} x", f"{own / k2:.2f} x"


def _iterations(label: str) -> tuple[str, str]:
    own = iteration("ours", label)
    return tuple(f"{iteration('full offload', label, blocking=blocking) / own:.2f} x" for blocking in (True, False))


def cores() -> str:
    """Update rates of the 20B model with fewer CPU cores."""
    body = []
    for count in (96, 48, 24, 12, 8, 4):
        machine = replace(NODE.machine, cores=count)
        work, mine = theirs(MODELS["20B"]), our_work(MODELS["20B"])
        best = clock_optimum(machine, mine)
        body.append((str(count), *_rates(machine, work, mine), f"{float(best.host_share):.0%} on {best.threads}"))
    header = ("cores of the node", "full offload, G params/s", "k=2", "ours", "ours over full offload", "over k=2")
    return table((*header, "on the CPU, threads a rank"), body)


def presets() -> str:
    """What is chosen on each preset, and the best rival there."""
    body = []
    for name in preset_names():
        machine = preset(name)
        work = Workload(parameters=2_000_000_000, ranks=machine.gpus, grad_bytes=2)
        chosen, best = choose(machine, work), clock_optimum(machine, work)
        steps = {rival: step_of(rival, machine, work).makespan for rival in RIVALS}
        rival = min(steps, key=steps.__getitem__)
        body.append(
            (
                name,
                f"{float(best.host_share):.0%} / {float(best.streamed_share):.0%}",
                f"{best.seconds:.3f}",
                f"{chosen.step_seconds / best.seconds - 1:+.1%}",
                chosen.limiting,
                rival,
                f"{steps[rival] / best.seconds:.2f} x",
                f"{steps['published, k=2'] / best.seconds:.2f} x",
            )
        )
    header = (
        "machine",
        "CPU / streamed",
        "step s",
        "closed form",
        "busiest lane",
        "best rival",
        "ours over it",
        "over k=2",
    )
    return table(header, body)


def queues() -> str:
    """Steps of the 20B model on the H100 node by the hardware queues of a GPU; one rank alone, and all of them."""
    body = []
    for ranks in (1, RANKS):
        machine = replace(NODE.machine, gpus=ranks)
        work, mine = (make(MODELS["20B"], ranks) for make in (theirs, our_work))
        node = f"{ranks} rank{'s' if ranks > 1 else ''}"
        for name in RIVALS:
            each, *one = (step_of(name, machine, replace(work, queues=queues)).makespan for queues in Queues)
            body.append((node, name, *_queue_columns(each, *one)))
        best = [clock_optimum(machine, replace(mine, queues=queues)) for queues in Queues]
        for share, threads in ((ASKED_HOST_SHARE, 0), (best[0].host_share, best[0].threads)):
            at_it = replace(mine, threads=threads)
            each, *one = (clocked(machine, replace(at_it, queues=queues), share).seconds for queues in Queues)
            body.append((node, f"ours, {float(share):.0%} on the CPU", *_queue_columns(each, *one)))
        shares = ", ".join(f"{float(estimate.host_share):.0%}" for estimate in best)
        columns = _queue_columns(*(estimate.seconds for estimate in best))
        body.append((node, f"ours, best share for each: {shares} on the CPU", *columns))
    header = ("node", "system", "a queue for each stream, s", "one, ahead", "one, when needed")
    return table(header, body)


def _queue_columns(each: float, ahead: float, when_needed: float) -> tuple[str, str, str]:
    return f"{each:.3f}", *(f"{one:.3f} ({one / each:.2f} x)" for one in (ahead, when_needed))


def preset_queues() -> str:
    """Steps of ours by the hardware queues, on each preset."""
    body = []
    for name in preset_names():
        machine = preset(name)
        work = Workload(parameters=2_000_000_000, ranks=machine.gpus, grad_bytes=2)
        asked = [
            clocked(machine, replace(work, queues=queues), ASKED_HOST_SHARE).seconds for queues in Queues
        ]
        one = replace(work, queues=Queues.ONE_AHEAD)
        best = clock_optimum(machine, one)
        steps = {rival: step_of(rival, machine, one).makespan for rival in RIVALS}
        rival = min(steps, key=steps.__getitem__)
        body.append(
            (
                name,
                *_queue_columns(*asked),
                f"{best.seconds:.3f} ({float(best.host_share):.0%} on the CPU)",
                rival,
                f"{steps[rival] / best.seconds:.2f} x",
            )
        )
    share = f"{float(ASKED_HOST_SHARE):.0%}"
    header = (
        *("machine", f"{share} on the CPU: a queue for each stream, s", "one, ahead", "one, when needed"),
        *("one, ahead: best share, s", "best rival with it", "ours over it"),
    )
    return table(header, body)


def sensitivity() -> str:
    """Ours over the measured k=2 of the 20B model under other assumptions."""
    measured = MODELS["20B"] / published_step("20B", 0.0, "interleaved", "step") / 1e9
    mine = our_work(MODELS["20B"])
    body = []

    def add(what: str, machine: Machine) -> None:
        none, some = (
            rate(mine, step_of("ours", machine, mine, share)) for share in (Fraction(0), equal_memory(machine, mine))
        )
        body.append((what, f"{machine.dram / 1e9:.0f}", f"{none / measured:.2f} x", f"{some / measured:.2f} x"))

    for link in (55, 50, 45):
        machine = replace(NODE.machine, h2d_together=link * 1e9, d2h_together=link * 1e9)
        add(f"{link} GB/s each way at once", machine)
    for passes in (42, 48):
        memory = reproduce.fit_memory("4xH100", passes)
        machine = replace(NODE.machine, dram=memory, cpu_update_max=memory / FUSED_PASS)
        add(f"{passes} bytes a parameter in the CPU passes of the published code, host memory fitted to that", machine)
    share = share_text(equal_memory(NODE.machine, mine))
    return table(("assumption", "host memory GB/s", "nothing resident", f"{share} resident"), body)


TABLES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "systems": systems,
    "claims": claims,
    "growth": growth,
    "cores": cores,
    "presets": presets,
    "queues": queues,
    "preset-queues": preset_queues,
    "sensitivity": sensitivity,
}


def with_tables(text: str) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: the markers of a table are missing.
    """
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"the page needs the markers {begin} and {end} once each")
        filled = f"{begin}\n{make()}\n{end}"
        text = pattern.sub(lambda _, filled=filled: filled, text)
    return text


def main() -> int:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written to {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
