# SPDX-License-Identifier: Apache-2.0
"""Ranks of a node that allocate at the same time do not count on the same memory."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from megatron_dos.node import memory, reservations


@pytest.fixture(autouse=True)
def file(monkeypatch, tmp_path):
    path = tmp_path / "promised"
    monkeypatch.setattr(reservations, "_path", lambda: path)
    return path


def hold(needed, outcome, end):
    """Another rank: reserves, and allocates when told to."""
    outcome.send(reservations.reserve(needed, lambda: 100))
    end.recv()
    reservations.release()


@pytest.fixture
def other():
    """Starts ranks; each reserves and stays there."""
    ranks = []

    def start(needed):
        context = multiprocessing.get_context("fork")
        outcome, sender = context.Pipe(duplex=False)
        receiver, end = context.Pipe(duplex=False)
        rank = context.Process(target=hold, args=(needed, sender, receiver), daemon=True)
        rank.start()
        ranks.append((rank, end))
        return outcome.recv(), rank, end

    yield start
    for rank, _ in ranks:
        rank.kill()
        rank.join()


def test_what_is_promised_to_others_is_not_available(other):
    assert other(60)[0] == 100
    assert other(60)[0] == 40  # refused
    assert other(30)[0] == 40
    assert reservations.reserve(11, lambda: 100) == 10


def test_what_has_been_taken_is_no_longer_promised(other):
    _, rank, end = other(60)
    end.send(None)
    rank.join()
    assert reservations.reserve(1, lambda: 40) == 40
    reservations.release()
    assert reservations.reserve(100, lambda: 100) == 100


def test_a_rank_that_was_killed_leaves_nothing_behind(other):
    _, rank, _ = other(60)
    rank.kill()
    rank.join()
    assert reservations.reserve(100, lambda: 100) == 100


def test_a_process_with_the_id_of_one_that_has_ended_is_another(file):
    file.write_text(f'{{"{os.getpid()}": [1.0, 60]}}')
    assert reservations.reserve(100, lambda: 100) == 100


@pytest.mark.parametrize("content", ["", "{", '{"1'])
def test_a_file_that_was_not_written_to_its_end_holds_nothing(file, content):
    file.write_text(content)
    assert reservations.reserve(100, lambda: 100) == 100


def test_page_locking_ranks_are_refused_together(monkeypatch, other):
    """Each alone would fit into what all of them see as available."""
    monkeypatch.setattr(memory.gpu, "in_use", lambda: True)
    monkeypatch.setattr(memory, "ranks_on_node", lambda: 2)  # a GPU that is not there has no place to ask for
    monkeypatch.setattr(memory, "available_host_memory", lambda: 100)
    other(60)
    with pytest.raises(memory.HostMemoryError):
        memory.require_host_memory(60)
    memory.require_host_memory(40)
    memory.host_memory_taken()
    assert reservations.reserve(40, lambda: 100) == 40
