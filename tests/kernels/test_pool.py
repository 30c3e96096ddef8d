# SPDX-License-Identifier: Apache-2.0
"""Worker threads: as many as this rank's share whatever OMP_NUM_THREADS says, in order, fork- and exit-safe."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from same_bits import assert_same_bits

from megatron_dos import _cpp_adam
from megatron_dos.gpu_check.cases import as_tensor, make_case, run_on_tensors
from megatron_dos.kernels import AdamScalars, cpu

SCALARS = AdamScalars.at_step(3, 1e-3, (0.9, 0.95), 1e-8, 0.1, True)
LARGE = 8 * 2**20


def piece(numel: int = LARGE) -> cpu.Operands:
    return cpu.Operands(torch.ones(numel), torch.zeros(numel), torch.zeros(numel), torch.ones(numel), SCALARS)


def run_python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter; its failure fails the test."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_submitted_job_gives_the_same_bits():
    case = make_case(np.random.default_rng(0), 5 * 65536 + 3, "bfloat16", "bfloat16")

    def run(*arguments):
        ticket = cpu.submit([cpu.Operands(*arguments)], threads=2)
        ticket.wait()
        assert ticket.poll()
        ticket.wait()

    assert_same_bits(run_on_tensors(case, run), case.expected())


def test_jobs_on_the_same_memory_run_in_order_of_submission():
    """Twelve steps in flight at once, on arrays large and small, equal twelve steps one by one."""
    for numel in (1000, 3 * 65536):
        one_by_one, in_flight = piece(numel), piece(numel)
        scalars = [AdamScalars.at_step(step, 0.1, (0.9, 0.95), 1e-8, 0.1, True) for step in range(1, 13)]
        for each in scalars:
            cpu.adamw_pieces([one_by_one._replace(scalars=each)], threads=1)
        tickets = [cpu.submit([in_flight._replace(scalars=each)], threads=3) for each in scalars[:-1]]
        cpu.adamw_pieces([in_flight._replace(scalars=scalars[-1])], threads=3)
        assert all(ticket.poll() for ticket in tickets), "a call that touches their memory waits for them"
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(one_by_one, name), getattr(in_flight, name))


def test_a_job_may_read_what_an_earlier_one_writes():
    first, second = piece(3 * 65536), piece(3 * 65536)
    second = second._replace(grad=first.param)
    for _ in range(5):
        first.param.fill_(1)
        before = second.param.clone()
        second.exp_avg.zero_()
        tickets = [cpu.submit([each], threads=3) for each in (first, second)]
        for ticket in tickets:
            ticket.wait()
        expected = [before, torch.zeros_like(before), torch.zeros_like(before)]
        cpu.adamw(*expected, first.param, SCALARS, threads=1)
        assert torch.equal(second.exp_avg, expected[1])


def test_a_job_waits_for_the_unfinished_end_of_an_earlier_one():
    """The second job is the last elements of the first: only its waiting keeps an idle worker from running it early."""
    job = piece(4 * LARGE)
    end = slice(4 * LARGE - 64, 4 * LARGE)
    tail = cpu.Operands(*(tensor[end] for tensor in job[:4]), AdamScalars.at_step(9, 0.5, (0.1, 0.2), 1e-3, 0.3, True))
    expected = [tensor[end].clone() for tensor in job[:4]]
    for _ in range(5):
        tickets = [cpu.submit([each], threads=3) for each in (job, tail)]
        for ticket in tickets:
            ticket.wait()
        for scalars in (SCALARS, tail.scalars):
            cpu.adamw(*expected, scalars, threads=1)
        assert torch.equal(job.param[end], expected[0])


def test_submit_returns_while_the_job_runs():
    job = piece()
    seen_running = 0
    for _ in range(10):
        ticket = cpu.submit([job], threads=1)
        seen_running += not ticket.poll()
        ticket.wait()
    assert seen_running, "ten jobs were all done when submit returned"


def test_the_gil_is_free_while_a_ticket_is_waited_for():
    job = piece(4 * LARGE)
    counted = [0]
    stop = threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    most = 0
    for _ in range(5):  # on a busy machine the job may be done before the wait begins
        ticket = cpu.submit([job], threads=1)
        before = counted[0]
        ticket.wait()
        most = max(most, counted[0] - before)
    stop.set()
    counter.join()
    assert most > 100, "Python code did not run while tickets were waited for"


def test_a_ticket_keeps_its_tensors_and_dropping_it_waits():
    job = piece()
    alive = weakref.ref(job.exp_avg)
    param, steps = job.param, 4
    tickets = [cpu.submit([job], threads=2) for _ in range(steps)]
    del job
    gc.collect()
    assert alive() is not None
    del tickets
    gc.collect()
    assert alive() is None
    expected = piece()
    for _ in range(steps):
        cpu.adamw_pieces([expected], threads=1)
    assert torch.equal(param, expected.param)


def test_waiting_on_several_threads_at_once():
    ticket = cpu.submit([piece()], threads=2)
    threads = [threading.Thread(target=ticket.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ticket.poll()


BUSY_WORKERS = """
    import os, threading, torch
    from pathlib import Path
    from megatron_dos.kernels import AdamScalars, cpu

    def worker_nanoseconds():
        tasks = [task for task in Path("/proc/self/task").iterdir() if "dos-adam" in (task / "comm").read_text()]
        return sorted(int((task / "schedstat").read_text().split()[0]) for task in tasks)

    scalars = AdamScalars.at_step(1, 1e-3, (0.9, 0.95), 1e-8, 0.0, True)
    tensors = [torch.zeros(2**23) for _ in range(4)]
    for attempt in range(50):
        cpu.adamw(*tensors, scalars)
        if attempt >= 3 and min(worker_nanoseconds()) > 5_000_000:
            break
    print(torch.get_num_threads(), cpu.pool().threads, sum(each > 5_000_000 for each in worker_nanoseconds()))
"""


def test_every_thread_works_although_omp_num_threads_is_one():
    share = len(os.sched_getaffinity(0))
    out = run_python(BUSY_WORKERS, OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="", LOCAL_RANK="")
    if share == 1:  # one worker is not worth a switch: the calling thread does the work
        assert out == "1 1 0"
    else:
        assert out == f"1 {share} {share}"


@pytest.mark.slow
def test_workers_stay_on_the_cpus_of_the_rank():
    code = """
        import os
        from pathlib import Path
        from megatron_dos.kernels import cpu
        pool = cpu.pool(2)
        tasks = [task for task in Path("/proc/self/task").iterdir() if "dos-adam" in (task / "comm").read_text()]
        print([sorted(os.sched_getaffinity(int(task.name))) for task in tasks] == [pool.cpus] * 2)
    """
    assert run_python(code, LOCAL_WORLD_SIZE="", LOCAL_RANK="") == "True"


def test_workers_take_no_signals():
    """A signal that lands on a worker would not wake Python's main thread."""
    cpu.pool(2)
    tasks = [task for task in Path("/proc/self/task").iterdir() if "dos-adam" in (task / "comm").read_text()]
    assert tasks
    for task in tasks:
        blocked = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
        assert int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1


def test_a_forked_child_updates_with_fresh_workers():
    code = """
        import os, sys, torch
        from megatron_dos.kernels import AdamScalars, cpu

        scalars = AdamScalars.at_step(1, 1e-3, (0.9, 0.95), 1e-8, 0.0, True)
        def make():
            return cpu.Operands(*(torch.ones(2**20) for _ in range(4)), scalars)
        busy = [make() for _ in range(4)]
        tickets = [cpu.submit([each], threads=2) for each in busy]
        child = os.fork()
        if child == 0:
            mine = make()
            cpu.adamw_pieces([mine], threads=2)
            cpu.submit([mine], threads=2).wait()
            expected = make()
            for _ in range(2):
                cpu.adamw_pieces([expected], threads=1)
            assert torch.equal(mine.param, expected.param)
            for ticket in tickets:
                if not ticket.poll():
                    try:
                        ticket.wait()
                    except RuntimeError as error:
                        assert "forked" in str(error)
            del tickets
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for ticket in tickets:
            ticket.wait()
        print("good")
    """
    # torch's own threads do not survive a fork: it must not have any here.
    assert run_python(code, OMP_NUM_THREADS="1") == "good"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit(0)", "del job", "raise SystemExit", "__builtins__.ticket = ticket", "del ticket, job"],
)
def test_the_interpreter_ends_well_with_jobs_in_flight(ending):
    code = f"""
        import sys, torch
        from megatron_dos.kernels import AdamScalars, cpu

        scalars = AdamScalars.at_step(1, 1e-3, (0.9, 0.95), 1e-8, 0.0, True)
        job = cpu.Operands(*(torch.ones(2**23) for _ in range(4)), scalars)
        for _ in range(5):
            ticket = cpu.submit([job], threads=2)
        print("submitted")
        {ending}
    """
    assert run_python(code) == "submitted"


def test_a_pool_that_goes_finishes_its_jobs():
    pool = _cpp_adam.Pool(2)
    job = piece()
    ticket = pool.submit([cpu._addresses(job)], keep_alive=job)
    del pool
    gc.collect()
    assert ticket.poll()


def test_many_small_jobs_in_flight():
    pieces = [piece(int(numel)) for numel in np.random.default_rng(1).integers(1, 3000, 300)]
    tickets = [cpu.submit([each], threads=3) for each in pieces]
    for ticket in reversed(tickets):
        ticket.wait()
    for each in pieces:
        expected = piece(each.param.numel())
        cpu.adamw_pieces([expected], threads=1)
        assert torch.equal(each.param, expected.param)


def test_another_instruction_set_can_be_forced_by_the_environment():
    code = "from megatron_dos import _cpp_adam; print(_cpp_adam.isa(), *_cpp_adam.supported_isas())"
    best, *supported = run_python(code, MEGATRON_DOS_ISA="").split()
    assert best == supported[0]
    for isa in supported:
        assert run_python(code, MEGATRON_DOS_ISA=isa).split()[0] == isa


@pytest.mark.parametrize("isa", ["sse9", "AVX2", "neon" if os.uname().machine == "x86_64" else "avx2"])
def test_an_instruction_set_that_is_not_there_is_refused_at_import(isa):
    done = subprocess.run(
        [sys.executable, "-c", "import megatron_dos._cpp_adam"],
        env={**os.environ, "MEGATRON_DOS_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: environment variable MEGATRON_DOS_ISA: ")
    assert isa in last
    assert "scalar" in last


def test_description_tells_instruction_set_threads_and_cpus():
    text = cpu.describe(2)
    assert _cpp_adam.isa() in text
    assert "2 threads" in text
    assert "1 thread" in cpu.describe(1)
    assert cpu._ranges([3, 1, 2, 8, 10, 9]) == "1-3,8-10"


def test_tensor_neighbours_check_sees_a_stray_write():
    """The guard that the other tests lean on."""
    from megatron_dos.gpu_check.cases import neighbours_intact

    tensor = as_tensor(np.zeros(4, np.float32))
    assert neighbours_intact(tensor)
    tensor.guarded[0][tensor.guarded[2]] = 0
    assert not neighbours_intact(tensor)
