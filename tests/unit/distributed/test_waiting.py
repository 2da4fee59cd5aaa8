"""Ranks that work while others wait: threads, which meet as ranks do."""

import threading

import pytest

from lm.distributed import waiting
from lm.distributed.waiting import Interrupted, WaitingRoom
from tests.meeting import on_ranks


def meet(num_ranks, work, stop_requested=lambda rank: 0):
    """Let each rank do work(room, rank) and gather its rank; returns outcomes and signs of life."""
    beats = [0] * num_ranks

    def run(rank, gather):
        def beat():
            beats[rank] += 1

        room = WaitingRoom(gather, beat, lambda: stop_requested(rank))
        try:
            work(room, rank)
            return room.gather(rank)
        except Interrupted as interruption:
            return interruption.number

    return on_ranks(num_ranks, run), beats


@pytest.fixture(autouse=True)
def call_at_once(monkeypatch):
    monkeypatch.setattr(waiting, "_CALL_SECONDS", 0)


@pytest.mark.parametrize("pieces", [(50, 0, 0), (0, 50, 20), (50, 50, 50)])
def test_ranks_that_are_done_see_that_the_others_work(pieces):
    def work(room, rank):
        for _ in range(pieces[rank]):
            room.at_work()

    outcomes, beats = meet(3, work)
    assert outcomes == [[0, 1, 2]] * 3
    assert min(beats) >= 50


@pytest.mark.parametrize("busy, signalled", [(0, 1), (1, 0), (1, 1)])
def test_a_stop_signal_interrupts_all(busy, signalled):
    stopped = threading.Event()

    def work(room, rank):
        while rank == busy:
            room.at_work()
            stopped.set()

    outcomes, _ = meet(2, work, lambda rank: 15 * (rank == signalled and stopped.is_set()))
    assert outcomes == [15, 15]
