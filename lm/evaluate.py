"""Measure the perplexity of a trained model, in one process or in several processes with mpirun.

  python -m lm.evaluate --run runs/small --split test
  python -m lm.evaluate --run runs/small --split my.txt --checkpoint best --json
  mpirun -np 2 python -m lm.evaluate --run runs/small --split valid,test

Each text is divided into --eval_batch_size rows, and each row starts with an empty recurrent state.
With --eval_batch_size 1, the model reads each text as one stream. A network without recurrent state
reads each window of num_steps tokens separately. With --lines, each line starts with an empty
state, and --eval_batch_size lines are scored together, in float32, as by lm.score.

With --json, the command prints one line with a JSON object for each split:

  {"run": "runs/x", "checkpoint": "runs/x/checkpoints/step-00000300", "split": "valid",
   "nll": 4.78, "tokens": 73760, "perplexity": 119.1, "unknown": 0, "bits_per_byte": 1.27,
   "word_perplexity": 119.1, "eval_batch_size": 20, "world_size": 1}

nll is the mean negative log-likelihood of a token in nats, and perplexity = exp(nll). Perplexities
are comparable only between models with the same tokenizer. To compare models with different
tokenizers on the same text, use these values. Each of them divides the sum over all tokens by a
size of the text that does not depend on the tokenizer:

  bits_per_byte = nll * tokens / ln 2 / bytes, where bytes is the size of the text in UTF-8
  word_perplexity = exp(nll * tokens / words), where words are separated by white space, and each
      line end is a word
  bits_per_character = nll * tokens / ln 2 / characters, only for the tokenizer `characters`

unknown is the number of words or other parts of the text that are not in the vocabulary. The model
predicts <unk> instead of them, which is easier. Therefore, the values above are comparable only if
unknown is 0. If the text itself contains <unk>, this <unk> counts as an ordinary word. If the files
contain token IDs, the text is not known, so the output does not contain these values.
word_perplexity is also missing if it exceeds the range of float64.
"""

import contextlib
import dataclasses
import json
import os

from lm.cli import program
from lm.cli.markdown import markdown_table
from lm.cli.parser import RunChoice, parse
from lm.config import MAX_ROWS, RunOptions
from lm.distributed.agreement import on_all_ranks
from lm.options import Checked, option
from lm.tensorflow_import import import_tensorflow


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(Checked):
    """The flags of this command."""

    split: str = option(
        "valid", "valid, test, train, a text file, or a comma-separated list of these", is_path=True
    )
    data_path: str | None = option(
        None, "text file or directory of the run's corpus or of a different corpus (default:"
        " recorded path)", is_path=True,
    )  # fmt: skip
    eval_batch_size: int | None = option(
        None, "number of rows per text (default: the value in the run's config)", low=1,
        high=MAX_ROWS,
    )  # fmt: skip
    token_dtype: str | None = option(
        None, "type of the integers in .bin files (default: the value in the run's config)"
    )
    lines: bool = option(
        False, "start each line with an empty state, as lm.score does, instead of dividing the text"
        " into rows",
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
    open_arguments, options = parsed
    import_tensorflow()
    supervisor.timeout = options.step_timeout_seconds
    from lm.events.reporter import Heartbeat
    from lm.inference.evaluation import evaluate

    with contextlib.closing(Heartbeat(lambda: supervisor.activity)):
        results = evaluate(
            _open_on_all_ranks(comm, open_arguments),
            splits=[os.path.expanduser(split.strip()) for split in options.split.split(",")],
            comm=comm,
            data_path=options.data_path,
            eval_batch_size=options.eval_batch_size,
            token_dtype=options.token_dtype,
            lines=options.lines,
            supervisor=supervisor,
        )
    if comm.is_rank_0 and options.json:
        print(*map(json.dumps, results), sep="\n")
    elif comm.is_rank_0:
        _print_table(results)


def _open_on_all_ranks(comm, arguments):
    """Open a run at the checkpoint that rank 0 finds.

    If the run is still training, other ranks may see a newer checkpoint.
    """
    from lm.inference.trained_run import open_run

    with on_all_ranks(comm):
        first = comm.is_rank_0 and open_run(**arguments)
    directory, checkpoint = comm.gather(first and [first.directory, first.checkpoint.path])[0]
    with on_all_ranks(comm):
        return first or open_run(**{**arguments, "directory": directory, "checkpoint": checkpoint})


def _print_table(results):
    columns = {
        "split": "{}", "perplexity": "{:.4f}", "nll": "{:.6f}", "bits_per_byte": "{:.6f}",
        "bits_per_character": "{:.6f}", "word_perplexity": "{:.4f}", "tokens": "{:,}",
        "unknown": "{:,}",
    }  # fmt: skip
    columns = {name: form for name, form in columns.items() if any(name in row for row in results)}
    rows = [
        [form.format(row[name]) if name in row else "-" for name, form in columns.items()]
        for row in results
    ]
    print(f"{results[0]['checkpoint']}, {results[0]['eval_batch_size']} row(s)\n")
    if any(row["unknown"] for row in results):
        print("Values per byte, character and word are comparable only where unknown is 0.\n")
    print(markdown_table([name.replace("_", " ") for name in columns], rows))


def main() -> None:
    program.run(_parse, _evaluate)


if __name__ == "__main__":
    main()
