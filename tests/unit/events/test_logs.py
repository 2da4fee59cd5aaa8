"""Log lines, and consoles and log files that fail."""

import logging
import os
import select
import threading

import pytest

from lm.errors import printable
from lm.events.logs import LogFiles
from tests.commands import run_code

PROGRAM = """
import logging, os, sys
from lm.events.logs import LogFiles, start_console
from lm.events.reporter import Progress
sys.stderr.isatty = lambda: True  # with a progress bar
start_console(0)
LogFiles(["{log}"], "master", 0)
progress = Progress(True, 1, 0, 100, (100, 100))
for step in range(1, 101):
    progress.update(("loss", 1.0), 1.0, tokens=1, seconds=1.0)
    logging.getLogger("lm").info(f"line {{step}}")
    if step == 50:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
progress.close()
print("the end")
"""


def test_a_failing_console_does_not_stop_the_program(tmp_path):
    result = run_code(PROGRAM.format(log=tmp_path / "log"))
    assert (result.returncode, result.stdout) == (0, "the end\n"), result.stderr
    assert "line 50\n" in result.stderr and "line 51\n" not in result.stderr
    assert len((tmp_path / "log").read_text().splitlines()) == 100


ESCAPES = """
import logging
from lm.cli import program
from lm.errors import UserError

def fail(argv):
    logging.getLogger("lm").warning("a \x1b]0;b\x07 \x9b1m")
    raise UserError("c \x1b[2J d\te")

program.run_alone(fail)
"""


def test_terminal_escapes_never_reach_the_console():
    result = run_code(ESCAPES)
    assert result.stderr == "a \ufffd]0;b\ufffd \ufffd1m\nlm: error: c \ufffd[2J d\te\n"


def test_characters_of_ordinary_texts_are_printable():
    text = "ن\u200cم 👩\u200d🔬 Sil\u00adbe \u3000字\u00a0\u200b\U0001fae8"
    assert printable(text) == text
    assert printable("a\u202eb\u2028\ud800\x9b\t", kept="\t") == "a\ufffdb\ufffd\ufffd\ufffd\t"


def test_lines_of_two_threads_are_written_once(tmp_path):
    path = tmp_path / "fifo"  # writers block until it is read
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    files = LogFiles([str(path)], "collect", 0)
    collect = threading.Thread(target=files.collect, args=(lambda _: [["x" * (1 << 20)]],))
    collect.start()
    select.select([reader], [], [])  # the writer is blocked in the middle of its lines
    log = threading.Thread(target=logging.getLogger("lm").warning, args=("beside",))
    log.start()
    os.set_blocking(reader, True)
    text = b""
    while text.count(b"x") < 1 << 20 or b"beside\n" not in text:
        text += os.read(reader, 1 << 20)
    collect.join()
    log.join()
    files.close()
    text += os.read(reader, 1 << 20)
    assert text.count(b"x") == 1 << 20 and text.count(b"beside") == 1


@pytest.mark.parametrize("rank, shown", [(0, "same\nlost\n"), (3, "lost\n")])
def test_rank_0_shows_warnings_and_all_ranks_show_errors(rank, shown):
    program = f"""
import logging
from lm.events.logs import start_console
start_console({rank})
logging.getLogger("lm").warning("same")
logging.getLogger("lm").error("lost")
"""
    result = run_code(program)
    assert (result.returncode, result.stderr) == (0, shown)


def test_only_the_last_lines_before_the_log_files_are_kept(tmp_path):
    program = f"""
import logging
from lm.events.logs import LogFiles, start_console
start_console(1)
for line in range(1500):
    logging.getLogger("lm").info(f"line {{line}}")
LogFiles(["{tmp_path}/runs/log.txt"], "workers", 1)  # on this host, runs/ does not exist
logging.getLogger("lm").info("later")
"""
    assert run_code(program).returncode == 0
    lines = [line.split("INFO ")[1] for line in open(tmp_path / "runs/log.1.txt")]
    assert lines == [*(f"line {line}\n" for line in range(500, 1500)), "later\n"]
