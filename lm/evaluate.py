"""Measure the perplexity of a trained model, in one process or under mpirun in several.

  python -m lm.evaluate --run runs/small --split test
  python -m lm.evaluate --run runs/small --split my.txt --checkpoint best --json
  mpirun -np 2 python -m lm.evaluate --run runs/small --split valid,test

Each text is cut into --eval_batch_size rows, and each row starts with an empty recurrent state.
With --eval_batch_size 1, the model reads each text as one stream.

With --json, the output has one object per line for each split:

  {"run": "runs/x", "checkpoint": "runs/x/checkpoints/step-00000300", "split": "valid",
   "nll": 4.78, "perplexity": 119.1, "bits_per_word": 6.9, "tokens": 73760, "unknown": 0,
   "eval_batch_size": 20, "world_size": 1}

nll is the mean negative log-likelihood of a token in nats, including the <eos> at the end of each
line. perplexity = exp(nll), and bits_per_word = nll / ln 2. unknown is the number of words that are
not in the vocabulary. A literal <unk> in the text is an ordinary word.
"""

import contextlib
import dataclasses
import json

from lm.cli import program
from lm.cli.flags import RunChoice, parse
from lm.cli.tables import markdown_table
from lm.config import MAX_ROWS, RunOptions
from lm.options import Checked, option
from lm.system import import_tensorflow


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(Checked):
    """The flags of this command."""

    split: str = option(
        "valid", "valid, test, train, a text file, or a comma-separated list of these", is_path=True
    )
    data_path: str | None = option(
        None, "directory of the run's corpus, or of another corpus (default: as recorded)",
        is_path=True,
    )  # fmt: skip
    eval_batch_size: int | None = option(
        None, "number of rows of each text (default: eval_batch_size of the run's config)", low=1,
        high=MAX_ROWS,
    )  # fmt: skip
    step_timeout_seconds: float = option(
        RunOptions().step_timeout_seconds,
        "end the job if a rank waits for other ranks for N seconds (0: never)",
        low=0,
    )
    json: bool = option(False, "print JSON, one object per line, instead of a table")


def _parse(argv):
    arguments = parse(argv, __doc__, RunChoice, EvaluateOptions)
    return arguments[RunChoice].open_arguments(), arguments[EvaluateOptions]


def _evaluate(parsed, comm, supervisor):
    run, options = parsed
    import_tensorflow()
    supervisor.timeout = options.step_timeout_seconds
    from lm.events.reporter import Heartbeat
    from lm.inference.evaluator import evaluate

    with contextlib.closing(Heartbeat(lambda: supervisor.activity)):
        results = evaluate(
            splits=[split.strip() for split in options.split.split(",")],
            comm=comm,
            data_path=options.data_path,
            eval_batch_size=options.eval_batch_size,
            supervisor=supervisor,
            **run,
        )
    if comm.is_rank_0 and options.json:
        print(*map(json.dumps, results), sep="\n")
    elif comm.is_rank_0:
        _print_table(results)


def _print_table(results):
    columns = {
        "split": "{}", "perplexity": "{:.4f}", "nll": "{:.6f}", "bits_per_word": "{:.6f}",
        "tokens": "{:,}", "unknown": "{:,}",
    }  # fmt: skip
    rows = [[form.format(row[name]) for name, form in columns.items()] for row in results]
    print(f"{results[0]['checkpoint']}, {results[0]['eval_batch_size']} row(s)\n")
    print(markdown_table([name.replace("_", " ") for name in columns], rows))


if __name__ == "__main__":
    program.run(_parse, _evaluate)
