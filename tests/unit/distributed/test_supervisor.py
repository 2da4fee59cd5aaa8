"""The supervisor ends ranks that hang, and keeps working and waiting ranks in touch."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lm.distributed import supervisor
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Supervisor
from tests.commands import run_code
from tests.meeting import on_ranks

# A real process without TensorFlow. The process of its second rank ends with it.
PROGRAM = """
import subprocess, time
from lm.distributed import supervisor
from lm.distributed.communicator import Communicator

other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)

class Ranks(Communicator):
    size = 2

    def gather(self, value):
        if isinstance(value, dict):  # the report of a phase
            return [value] * 2
        host, _, namespace = value
        return [value, (host, other.pid, namespace), {elsewhere}]

supervisor.TICK_SECONDS = 0.02
watched = supervisor.Supervisor(Ranks(), {timeout})
{work}
print("alive")
"""
SLEEP = "time.sleep(30)"


ALLOWED = {
    "a preparation": ("watched.preparing('x').__enter__()", "time.sleep(2)"),
    "progress": (
        "for _ in range(20):",
        "    with watched.exchange('step 7'): time.sleep(0.1)",
        "with watched.waiting('the work'):",
        "    for _ in range(20): watched.progressed(); time.sleep(0.1)",
    ),
}
HANGS = {  # the phase in the message -> lines
    "step 7, waiting for rank 1, which": ("with watched.exchange('step 7'):", f"    {SLEEP}"),
    "a write (--step_timeout_seconds)": ("with watched.waiting('a write'):", f"    {SLEEP}"),
    "a save": (  # Staying in touch is not progress.
        "with watched.waiting('a save') as waiting:",
        "    while True: waiting.poll(progress=False); time.sleep(0.1)",
    ),
    "a save, waiting for rank 1": (  # After an inner phase, its outer phase continues.
        "with watched.exchange('a save'):",
        "    with watched.waiting('a write'): pass",
        f"    {SLEEP}",
    ),
}
GONE = ("other.kill()", "other.wait()", SLEEP)
ELSEWHERE = {  # number of ranks on other hosts -> their names in the message
    16: "ranks 2 to 9 on n0 or ranks 10 to 17 on n1",
    992: "the ranks on 124 other hosts",
}


def test_a_process_of_another_host_with_the_same_name_is_not_looked_up_here():
    own = supervisor._this_process()
    gone = own._replace(pid=2**30)
    elsewhere = gone._replace(namespace="another host")
    assert supervisor._stopped([own, gone, elsewhere], own) == [1]


def run(case):
    """Run code with a timeout of one second, on two ranks and on ranks elsewhere."""
    lines, num_elsewhere = case
    elsewhere = f"*((f'n{{rank // 8}}', 1, '') for rank in range({num_elsewhere}))"
    return run_code(PROGRAM.format(timeout=1, work="\n".join(lines), elsewhere=elsewhere))


@pytest.fixture(scope="module")
def results():
    """The results of all programs, which mostly sleep and run at the same time."""
    cases = [(lines, 0) for lines in (*ALLOWED.values(), *HANGS.values(), GONE)]
    cases += [(next(iter(HANGS.values())), count) for count in ELSEWHERE]
    with ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(cases, pool.map(run, cases)))


@pytest.mark.parametrize("name", ALLOWED)
def test_the_supervisor_allows_time_for(results, name):
    assert results[ALLOWED[name], 0].stdout == "alive\n"


@pytest.mark.parametrize("where", HANGS)
def test_a_phase_that_hangs_is_named_at_the_timeout(results, where):
    result = results[HANGS[where], 0]
    assert result.returncode == 1
    assert f"no progress for 1 s in {where}" in result.stderr


def test_a_preparation_ends_if_another_rank_is_gone(results):
    result = results[GONE, 0]
    assert result.returncode == 1
    assert "in the preparation, waiting for rank 1 on " in result.stderr
    assert "which is stopped or gone" in result.stderr


@pytest.mark.parametrize("num_ranks", ELSEWHERE)
def test_messages_name_ranks_on_many_hosts_briefly(results, num_ranks):
    result = results[next(iter(HANGS.values())), num_ranks]
    assert f"in step 7, waiting for {ELSEWHERE[num_ranks]} (--step" in result.stderr


def test_time_while_the_job_is_suspended_does_not_count():
    work = "with watched.exchange('step 7'):"
    work += " print('begun', flush=True); input(); time.sleep(0.7)"
    program = PROGRAM.format(timeout=1, work=work, elsewhere="")
    command, pipes = [sys.executable, "-c", program], dict.fromkeys(("stdin", "stdout"), -1)
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # the fault itself
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate("\n", timeout=30)
    assert (process.returncode, output) == (0, "alive\n")


@pytest.mark.parametrize("pieces", [(50, 0, 0), (0, 50, 20), (50, 50, 50)])
def test_waiting_ranks_see_that_other_ranks_work(monkeypatch, pieces):
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0)
    progress = [0] * 3

    def run_rank(rank, gather):
        class Watched(Supervisor):
            def progressed(self):
                progress[rank] += 1

        comm = Communicator()
        comm.gather = gather
        with Watched(comm, 0) as watched, watched.waiting("the evaluation") as waiting:
            for _ in range(pieces[rank]):
                waiting.poll()
            return waiting.gather(rank)

    assert on_ranks(3, run_rank) == [[0, 1, 2]] * 3
    assert min(progress) >= 50
