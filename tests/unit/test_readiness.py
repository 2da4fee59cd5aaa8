"""How the ranks of a check-up are started, and how its lines read."""

import pytest

from lm.checklist import Checklist
from lm.errors import UserError
from lm.readiness import check_output_dir
from lm.readiness_launch import mpirun_command


def test_hosts_and_slots_make_the_number_of_ranks():
    command = mpirun_command("host1:2,host2", "-mca btl_tcp_if_include eth0")
    assert command[:5] == ["mpirun", "-np", "3", "-H", "host1:2,host2"]
    assert command[-3:] == ["-mca", "btl_tcp_if_include", "eth0"]
    assert "^openib" in command


def test_without_hosts_there_are_two_local_ranks():
    assert mpirun_command("", "")[:3] == ["mpirun", "-np", "2"]


@pytest.mark.parametrize("hosts, flags", [("host1:many", ""), ("host1", "-x 'open")])
def test_flags_that_cannot_be_understood_are_errors(hosts, flags):
    with pytest.raises(UserError, match="--hosts must look like"):
        mpirun_command(hosts, flags)


def test_lines_have_a_status_and_a_remedy(capsys):
    checklist = Checklist()
    checklist.ok("one", "fine")
    checklist.judge(False, "two", "slow", "buy a faster one")
    checklist.judge(False, "three", "broken", "mend it", fatal=True)
    checklist.conclude()
    assert capsys.readouterr().out.splitlines() == [
        "OK    one         fine",
        "WARN  two         slow",
        "                  -> buy a faster one",
        "FAIL  three       broken",
        "                  -> mend it",
        "not ready: 1 FAIL, 1 WARN",
    ]


def test_an_output_dir_is_checked_without_being_made(tmp_path, capsys):
    checklist = Checklist()
    check_output_dir(checklist, str(tmp_path / "runs/later"))
    assert checklist.num_failures == 0 and not list(tmp_path.iterdir())
    check_output_dir(checklist, "/proc/nowhere")
    assert checklist.num_failures == 1
    assert "cannot write to /proc" in capsys.readouterr().out
