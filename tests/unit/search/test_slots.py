"""The slots of trials: two trials never share a core or a slot of a host."""

import itertools
import os

import pytest

from lm.distributed.cores import HOST_SLOTS, claim_cores, cores_of_slots
from lm.errors import UserError
from lm.search.slots import HostSlots, divide_hosts


def numbers(slots):
    return {(s.host, slot) for s in slots for slot in range(s.first, s.first + s.count)}


@pytest.mark.parametrize("ranks, trials, hosts", [
    (2, None, "a:2,b:2"), (3, None, "a:2,b:4"), (1, None, "a:3,b:2"), (4, None, "a:2,b:2"),
    (2, 1, "a:2,b:2"),
])  # fmt: skip
def test_each_slot_belongs_to_one_trial(ranks, trials, hosts):
    made = divide_hosts(ranks, trials, hosts)
    assert all(len(numbers(slots)) == ranks for slots in made)
    assert not any(numbers(a) & numbers(b) for a, b in itertools.combinations(made, 2))
    total = sum(int(part[2:]) for part in hosts.split(","))
    assert len(made) == (trials or total // ranks)


def test_a_trial_may_span_hosts():
    assert divide_hosts(3, None, "a:2,b:4")[0] == (HostSlots("a", 0, 2, 2), HostSlots("b", 0, 1, 4))


@pytest.mark.parametrize("num_cores, num_places, ranks", [(2, 2, 2), (7, 3, 1), (8, 2, 3)])
def test_the_cores_of_a_host_are_divided(num_cores, num_places, ranks):
    cores, total = list(range(10, 10 + num_cores)), num_places * ranks
    shares = [cores_of_slots(cores, p * ranks, ranks, total) for p in range(num_places)]
    assert list(itertools.chain(*shares)) == cores and all(shares)


def test_a_process_uses_only_its_cores(monkeypatch):
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    try:
        halves = []
        for first in range(2):
            monkeypatch.setenv(HOST_SLOTS, f"{first}:1:2")
            claim_cores()
            halves.append(os.sched_getaffinity(0))
        assert all(halves) and not halves[0] & halves[1]
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    "arguments, message",
    [((1, 10**6, None), "cores"), ((3, None, "a:1,b:1"), "2 slots, too few"),
     ((1, 3, "a:1,b:1"), "2 slots, too few"), ((1, None, "a:100000"), "hosts must be like"),
     ((4096, None, "a:4095"), "4095 slots, too few")],
)  # fmt: skip
def test_too_few_slots_are_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        divide_hosts(*arguments)
