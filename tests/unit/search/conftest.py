"""A search of learning rates, with a shell script instead of lm.train."""

import contextlib
import sys

import pytest

from lm.distributed.signals import Signals
from lm.search import driver
from lm.search.driver import Driver
from lm.search.settings import parse_search
from lm.search.study import open_search

# The perplexity of each epoch is 1000 / learning rate, unless the body of the test differs.
TRAINER = """#!/bin/bash
rate=1.0  # of the config
while [[ $1 != --output_dir ]]; do
    [[ $1 != --learning_rate=* ]] || rate=${{1#*=}}
    shift
done
cd "$2"
event() {{ echo "{{\\"event\\": $1}}" >>metrics.jsonl; }}
end() {{ event "\\"end\\", \\"outcome\\": \\"$1\\", \\"reason\\": \\"$2\\""; }}
value() {{ echo "\\"valid_perplexity\\": $((1000 / ${{rate%.*}}))"; }}
times="\\"epoch_seconds\\": 1, \\"tokens_per_second\\": 1"
steps() {{ echo "\\"step\\": $1, \\"epoch\\": $1, \\"epochs\\": $1"; }}
epoch() {{ event "\\"epoch\\", $(steps $1), $(value), $times"; }}
fail() {{ end failed "$1"; exit ${{2:-1}}; }}
trap 'echo saved >>starts; end stopped; exit 143' USR2
echo start >>starts
{body}
epoch 1; epoch 2; end finished
"""


@pytest.fixture
def search(tmp_path, corpora, monkeypatch):
    """Return a function that runs a search of learning rates, with code for the trainer.

    `on_tick` is called before each turn of the driver.
    """
    monkeypatch.setattr(driver, "TICK_SECONDS", 0.01)
    trainer = tmp_path / "python"

    def run(*flags, body="", on_tick=lambda: None):
        trainer.write_text(TRAINER.format(body=body))
        trainer.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(trainer))
        with contextlib.ExitStack() as stack:
            found = open_search(*parse_search(run.command(*flags)), stack)

            class Observed(Driver):
                def _tick(self):
                    on_tick()
                    super()._tick()

            Observed(found, stack.enter_context(contextlib.closing(Signals()))).run()
        return found.study

    def command(*flags):
        """Return a command line. Later flags replace earlier flags."""
        return [
            "lm.search", "--config=config_test", "--num_epochs=2", "--sampler=grid", "--trials=9",
            "--space=learning_rate=1|2|4", f"--data_path={corpora}",
            f"--output_dir={run.directory}", "--resume", *flags,
        ]  # fmt: skip

    run.command = command
    run.directory = tmp_path / "search"
    return run
