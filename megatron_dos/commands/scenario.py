# SPDX-License-Identifier: Apache-2.0
"""What `plan` and `simulate` reason about: a job on a machine, its memory, and the time of its iterations.

Times of the update are the virtual clock's. Forward and backward passes are floating-point operations over the rate of
the machine, with the bubble of a pipeline; the communication of parallel groups is not in them. Activations are counted
by the rules of Korthikanti et al. 2022 (attention without stored scores); they are an estimate.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dos.calibration import cache as calibration
from megatron_dos.commands import CommandError
from megatron_dos.commands.megatron_flags import Job
from megatron_dos.commands.models import Stage, stages, total_parameters
from megatron_dos.commands.text import short
from megatron_dos.observing.trace import Span, spans_of
from megatron_dos.options.options import AUTOMATIC_EARLY_SLOTS, DosOptions
from megatron_dos.planning.clock import Queues
from megatron_dos.planning.machine import Machine, MachineError, load, preset, preset_names
from megatron_dos.planning.systems import Design, GradTransfer
from megatron_dos.program.partition import BYTES_PER_PARAMETER
from megatron_dos.words import plural

if TYPE_CHECKING:
    from megatron_dos.planning.workload import Workload
    from megatron_dos.program.timeline import Timeline

__all__ = [
    "MOST_PARAMETERS",
    "Passes",
    "Scenario",
    "add_machine_flag",
    "iteration_spans",
    "machine_of",
    "scenario_of",
    "scenario_of_count",
]

_DEFAULT_MACHINE = "h100-pcie5"
MOST_PARAMETERS = 10**14
_MOST_OWNED = 10**11
_MOST_SUBGROUPS = 3_000
_FEWEST_CONNECTIONS, _MOST_CONNECTIONS = 8, 32  # what CUDA has without the variable, and what it allows
_ENQUEUE = {"ahead": Queues.ONE_AHEAD, "when-needed": Queues.ONE_WHEN_NEEDED}


@dataclass(frozen=True)
class Passes:
    """Seconds that one rank computes in the forward and the backward passes of an iteration, bubbles included."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Scenario:
    """A job on a machine.

    Attributes:
        name: of the model.
        job: None where only the number of parameters is known.
        parameters: of the model.
        stage: the pipeline stage with most to update.
        work: the update of its ranks.
        settings: the options of deep optimizer states, those of this command line before those of the job.
        params, grads, activations: bytes on each GPU of that stage; activations at their most.
        passes: of the slowest stage.
    """

    name: str
    job: Job | None
    machine: Machine
    notes: tuple[str, ...]
    parameters: int
    stage: Stage
    work: Workload
    settings: DosOptions
    passes: Passes
    params: int
    grads: int
    activations: int

    @property
    def machine_name(self) -> str:
        """The machine's name, and how much of it was measured where the GPU was not."""
        of_gpu = self.machine.preset_of_gpu
        about = f" (host measured, GPU values of preset {of_gpu})" if of_gpu else ""
        return self.machine.name + about

    @property
    def resident_share(self) -> float:
        """Part of the states that stays on the GPU."""
        return self.settings.dos_resident_share

    @property
    def known_job(self) -> Job:
        """The job, where it is known: always for `plan`."""
        assert self.job is not None
        return self.job

    @property
    def asked(self) -> dict[str, Any]:
        """What the GPU is to update where that is not left to be found: the argument of `perf_model.choose`."""
        if self.settings.dos_update_stride:
            return {"stride": self.settings.dos_update_stride}
        return {"gpu_share": self.settings.dos_gpu_share} if self.settings.dos_gpu_share >= 0 else {}

    @property
    def states(self) -> int:
        """Bytes of the states that a rank owns."""
        return BYTES_PER_PARAMETER * self.stage.owned


def add_machine_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        metavar="PRESET|FILE",
        help=f"{', '.join(preset_names())}, or a file of megatron-dos calibrate; default: this machine where it has "
        f"been measured with its GPUs, else {_DEFAULT_MACHINE}",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of a rank, as --dos-cpu-threads; default: its share of the cores",
    )
    parser.add_argument(
        "--subgroup-size",
        type=int,
        metavar="N",
        help="parameters of a subgroup, as --dos-subgroup-size; default: automatic",
    )
    parser.add_argument(
        "--grad-transfer",
        choices=("fp32", "model"),
        help="how gradients go to the CPU, as --dos-grad-transfer; default: fp32",
    )
    parser.add_argument(
        "--early-grads",
        action="store_true",
        help="send all gradients of the CPU's subgroups in the backward pass, as with enough --dos-early-grad-slots",
    )
    parser.add_argument(
        "--resident-share",
        type=_share,
        metavar="SHARE",
        help="part of the states that stays on the GPU, as --dos-resident-share; default: 0",
    )
    parser.add_argument(
        "--connections",
        type=_connections,
        default=_FEWEST_CONNECTIONS,
        metavar="N",
        help="CUDA_DEVICE_MAX_CONNECTIONS of the launch: with 1, all streams of a GPU share one hardware queue, and an "
        f"operation that waits holds up all that were enqueued after it; {_FEWEST_CONNECTIONS} to {_MOST_CONNECTIONS} "
        f"are enough for a queue for each stream; default: {_FEWEST_CONNECTIONS}",
    )
    parser.add_argument(
        "--enqueue",
        choices=tuple(_ENQUEUE),
        help="with --connections 1: how operations are enqueued, in all systems: ahead, as training does, or each only "
        "when what it depends on has ended (when-needed), to see what that would gain; default: ahead",
    )


def _connections(text: str) -> int:
    if text.isdecimal() and (int(text) == 1 or _FEWEST_CONNECTIONS <= int(text) <= _MOST_CONNECTIONS):
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{text}: give 1, which is one hardware queue for all streams, or {_FEWEST_CONNECTIONS} to {_MOST_CONNECTIONS}"
    )


def _queues(options: argparse.Namespace) -> Queues:
    """The hardware queues that --connections and --enqueue describe.

    Raises:
        CommandError: --enqueue is given, and each stream has a queue of its own.
    """
    if options.connections == 1:
        return _ENQUEUE[options.enqueue or "ahead"]
    if options.enqueue:
        raise CommandError(
            f"--enqueue {options.enqueue} has no effect with a hardware queue for each stream: add --connections 1, or "
            "drop it"
        )
    return Queues.EACH


def _about_queues(queues: Queues) -> list[str]:
    """A note on what is assumed of one queue."""
    how = {
        Queues.ONE_AHEAD: "enqueued ahead, as in training",
        Queues.ONE_WHEN_NEEDED: "enqueued when what they depend on has ended, which training does not do",
    }
    if queues not in how:
        return []
    return [f"--connections 1: operations of all streams of a GPU share one hardware queue; they are {how[queues]}"]


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range: give 0 to 1")
    return value


def machine_of(name: str | None) -> tuple[Machine, str]:
    """The machine that --machine names, and a note on which it is.

    Raises:
        CommandError: there is none of that name, or the file holds none.
    """
    if name is not None and name not in preset_names() and not Path(name).exists():
        raise CommandError(f"--machine {name}: no preset or file of that name; presets: {', '.join(preset_names())}")
    try:
        if name is not None:
            return load(name), ""
        measured = calibration.cached_machine()
        if measured is None:
            about = "and this one has not been measured"
        elif of_gpu := measured.preset_of_gpu:
            kept = calibration.cache_file(measured.fingerprint)
            about = f"and of this one the host alone was measured (--machine {kept} takes its GPU from preset {of_gpu})"
        else:
            return measured, "no --machine: this machine, as it was measured"
        return preset(_DEFAULT_MACHINE), f"no --machine, {about}: {_DEFAULT_MACHINE} is taken"
    except MachineError as error:
        raise CommandError(f"--machine: {error}") from error


def scenario_of(job: Job, options: argparse.Namespace) -> Scenario:
    """The job on the machine, with the options of `add_machine_flag`.

    Raises:
        CommandError: sizes or options that make no sense.
    """
    machine, note = machine_of(options.machine)
    queues = _queues(options)
    parameters = total_parameters(job.shape)
    if parameters > MOST_PARAMETERS:
        raise CommandError(f"{job.name}: {short(parameters)} parameters are beyond any machine; check its sizes")
    found = stages(job.shape, job.layout)
    stage = max(found, key=lambda each: each.owned)
    training = job.training
    _check_owned(job.name, stage.owned)
    settings = _settings(machine, options, job.settings, stage.owned)
    narrow = training.grad_bytes == 2
    work = _work(machine, settings, options.early_grads, stage.owned, job.layout.gpus)
    work = replace(
        work,
        grad_bytes=2 if narrow and settings.dos_grad_transfer == "model" else 4,
        param_bytes=training.param_bytes,
        casts=narrow and settings.dos_grad_transfer == "fp32",
        queues=queues,
    )
    notes = [*job.notes, *_about_queues(queues)]
    if training.overlaps:
        notes.append(
            "--overlap-grad-reduce: subgroups end where its buckets do, so there are more of them, and smaller ones, "
            "than are counted here"
        )
        if training.early_grads and not work.early_grads:
            work = replace(work, early_grads=_all_sent_early(settings, work, notes))
    return Scenario(
        name=job.name,
        job=job,
        machine=machine,
        notes=(*notes, *([note] if note else [])),
        parameters=parameters,
        stage=stage,
        work=work,
        settings=settings,
        passes=_passes(job, machine, found),
        params=training.param_bytes * stage.parameters,
        grads=training.grad_bytes * stage.parameters,
        activations=_activations(job, found),
    )


def scenario_of_count(parameters: int, gpus: int, options: argparse.Namespace) -> Scenario:
    """A model of which only the number of parameters is known: data parallel, 2048 tokens a GPU, all recomputed.

    Raises:
        CommandError: sizes or options that make no sense.
    """
    machine, note = machine_of(options.machine)
    queues = _queues(options)
    name = f"{short(parameters)} parameters"
    owned = -(-parameters // gpus)
    _check_owned(name, owned)
    settings = _settings(machine, options, DosOptions(), owned)
    forward = 2 * parameters * 2048 / machine.matmul
    about = "no shape: 2048 tokens a GPU, activations recomputed in full, no tensor or pipeline parallelism"
    return Scenario(
        name=name,
        job=None,
        machine=machine,
        notes=(about, *_about_queues(queues), *([note] if note else [])),
        parameters=parameters,
        stage=Stage(dense=parameters, experts=0, owned=owned, layers=0),
        work=replace(_work(machine, settings, options.early_grads, owned, gpus), queues=queues),
        settings=settings,
        passes=Passes(forward, 3 * forward),
        params=2 * parameters,
        grads=4 * parameters,
        activations=0,
    )


def _settings(machine: Machine, options: argparse.Namespace, of_job: DosOptions, owned: int) -> DosOptions:
    """The options of this command line before those of the job, after a look at what the machine allows.

    Raises:
        CommandError: threads that the machine has not, or a subgroup size out of range.
    """
    given = {
        "dos_cpu_threads": options.threads,
        "dos_subgroup_size": options.subgroup_size,
        "dos_grad_transfer": options.grad_transfer,
        "dos_resident_share": options.resident_share,
    }
    threads = of_job.dos_cpu_threads if options.threads is None else options.threads
    if not 0 <= threads <= 2 * machine.cores:
        flag = "--dos-cpu-threads" if options.threads is None else "--threads"
        raise CommandError(
            f"{flag} {threads}: {machine.name} has {plural(machine.cores, 'core')}; give at most twice as many, or 0, "
            "which is a rank's share of them"
        )
    size = of_job.dos_subgroup_size if options.subgroup_size is None else options.subgroup_size
    least = -(-owned // _MOST_SUBGROUPS)
    if size and not least <= size <= 2**40:
        flag = "--dos-subgroup-size" if options.subgroup_size is None else "--subgroup-size"
        raise CommandError(f"{flag} {size}: give 0, which is automatic, or at least {least} and at most {2**40}")
    return replace(of_job, **{name: value for name, value in given.items() if value is not None})


def _all_sent_early(settings: DosOptions, work: Workload, notes: list[str]) -> bool:
    """Whether each subgroup's grads have a slot: the model knows all or none. A note says what it takes."""
    if work.queues is not Queues.EACH and settings.dos_overlap_grad_d2h == "auto":
        notes.append(
            "--overlap-grad-reduce: no gradients are sent in the backward pass, because --dos-overlap-grad-d2h auto is "
            "off with CUDA_DEVICE_MAX_CONNECTIONS=1"
        )
        return False
    slots, count = settings.dos_early_grad_slots or AUTOMATIC_EARLY_SLOTS, len(work.subgroups)
    if slots >= count:
        if settings.dos_overlap_grad_d2h == "auto":
            notes.append(
                "--overlap-grad-reduce: assumes that all gradients are sent in the backward pass, as in training "
                "unless CUDA_DEVICE_MAX_CONNECTIONS or TORCH_NCCL_BLOCKING_WAIT is 1"
            )
        return True
    notes.append(
        f"--overlap-grad-reduce: gradients of {slots} of {plural(count, 'subgroup')} may be sent in the backward pass "
        "(--dos-early-grad-slots); this estimate counts all of them in the update, or with --early-grads none of them"
    )
    return False


def _check_owned(name: str, owned: int) -> None:
    if owned > _MOST_OWNED:
        raise CommandError(
            f"{name}: each rank would own the states of {short(owned)} parameters; {short(_MOST_OWNED)} are beyond any "
            "node's memory. Give more --gpus"
        )


def _work(machine: Machine, settings: DosOptions, early_grads: bool, owned: int, gpus: int) -> Workload:
    """The update of a rank with FP32 grads and 16-bit params."""
    from megatron_dos.planning.workload import Workload

    return Workload(
        parameters=owned,
        ranks=min(gpus, machine.gpus),
        threads=settings.dos_cpu_threads,
        subgroup=settings.dos_subgroup_size,
        early_grads=early_grads,
    )


# --- Forward and backward


def _passes(job: Job, machine: Machine, found: list[Stage]) -> Passes:
    layout, training = job.layout, job.training
    slowest = max(_forward_flops(job, number, stage) for number, stage in enumerate(found))
    bubble = 1 + (layout.pipeline - 1) / (training.micro_batches * layout.chunks)
    forward = training.micro_batches * slowest / machine.matmul * bubble
    return Passes(forward, forward * (3 if training.recompute == "full" else 2))


def _forward_flops(job: Job, number: int, stage: Stage) -> float:
    """Floating-point operations of one rank in the forward pass of a micro-batch."""
    shape, layout, training = job.shape, job.layout, job.training
    tokens = training.micro_batch * training.sequence / layout.context
    words = shape.padded_vocab_size // layout.tensor * shape.hidden_size
    multiplied: float = stage.dense - (words + shape.max_position_embeddings * shape.hidden_size if number == 0 else 0)
    if number == layout.pipeline - 1 and number == 0 and not shape.untied:
        multiplied += words  # the output layer multiplies with the embedding
    if stage.experts:
        multiplied += stage.experts * layout.expert * shape.experts_per_token / shape.num_experts
    # Scores and their product with the values, of which a causal mask leaves half.
    attention = stage.layers * 2 * training.sequence * shape.num_attention_heads * shape.kv_channels / layout.tensor
    return tokens * (2 * multiplied + attention)


def _activations(job: Job, found: list[Stage]) -> int:
    """Bytes that one rank keeps for the backward pass, at their most: in the first stage, or the logits of the last."""
    shape, layout, training = job.shape, job.layout, job.training
    tokens = training.micro_batch * training.sequence // layout.context
    hidden, tensor = shape.hidden_size, layout.tensor
    query, kv = (heads * shape.kv_channels for heads in (shape.num_attention_heads, shape.num_query_groups))
    inner = shape.moe_ffn_hidden_size * shape.experts_per_token if shape.num_experts else shape.ffn_hidden_size
    divided = 2 * (query + 2 * kv) + 2 * query + 2 * inner * (3 if shape.gated else 2)
    whole = 10 * hidden // (tensor if training.sequence_parallel else 1)
    layer = whole + divided // tensor
    kept = layer
    extra = 0
    if training.recompute == "full":
        kept = 2 * hidden // (tensor if training.sequence_parallel else 1)
        extra = layer  # the one that is being recomputed
    in_flight = min(training.micro_batches * layout.chunks, layout.pipeline * layout.chunks + layout.pipeline - 1)
    per_chunk = max(stage.layers for stage in found) / layout.chunks
    first = tokens * (kept * per_chunk * (in_flight if layout.pipeline > 1 else 1) + extra)
    logits = 6 * tokens * shape.padded_vocab_size // tensor  # 16 bits, and FP32 for the loss
    last = tokens * (kept * per_chunk * layout.chunks + extra) + logits
    return round(max(first, last))


# --- An iteration


def iteration_spans(scenario: Scenario, design: Design, timeline: Timeline) -> list[Span]:
    """Forward pass, backward pass with the grads that are sent during it, and the step, one after the other."""
    from megatron_dos.observing.figures import SubgroupTraffic, bytes_moved
    from megatron_dos.program.schedule import OpKind, Placement

    work, passes, machine = scenario.work, scenario.passes, scenario.machine
    grads = design.grad_transfer(work.early_grads)
    grad_bytes, param_bytes = (4, 4) if design.travels_in_fp32 else (work.grad_bytes, work.param_bytes)
    spans = [Span("gpu", "forward", 0.0, passes.forward)]
    sent = [
        (index, numel)
        for index, (numel, place) in enumerate(zip(work.subgroups, timeline.program.placements, strict=True))
        if place is Placement.HOST and grads is not GradTransfer.IN_STEP
    ]
    computed, copied = passes.forward, 0.0
    # Grads are final in the backward pass of the last micro-batch.
    micro_batches = scenario.job.training.micro_batches if scenario.job else 1
    last = passes.backward / micro_batches
    if sent and micro_batches > 1:
        spans.append(Span("gpu", "backward", computed, passes.backward - last))
        computed += passes.backward - last
    for index, numel in sent:
        slice_s, copy_s = last / len(sent), grad_bytes * numel / machine.d2h_alone
        spans.append(Span("gpu", "backward", computed, slice_s))
        computed += slice_s
        start = max(computed, copied)
        args = {"subgroup": index, "bytes": grad_bytes * numel}
        spans.append(Span("d2h", OpKind.GRAD_TO_HOST.value, start, copy_s, args))
        copied = start + copy_s
        if grads is GradTransfer.SHOWN:
            computed = copied
    if not sent:
        spans.append(Span("gpu", "backward", computed, passes.backward))
        computed += passes.backward
    traffic = [SubgroupTraffic(numel, grad_bytes * numel, param_bytes * numel) for numel in work.subgroups]
    step = spans_of(timeline, bytes_moved(traffic), max(computed, copied))
    # Copies of grads that were sent before take no time in the step.
    return spans + [span for span in step if span.duration_s > 0 or span.name == OpKind.RELEASE_BUCKET.value]
