"""Print the log-probability of each text on stdin, one text per line.

  python -m lm.score --run runs/small < sentences.txt > scores.tsv

The command prints one line for each input line, as soon as it has read the input line. The output
has no header and these columns, which are separated by tabs:

  log-probability, tokens, unknown, text [, log-probabilities of its tokens]

All logarithms are natural. The tokenizer of the run divides each text into tokens. The recurrent
state is empty at the start of each text. The line end of the text is scored too; for the tokenizer
words, it is the token <eos>. Words or characters that are not in the vocabulary count as unknown
and are scored as <unk>. In the text column, all white space is replaced by single spaces. The last
column is printed only with --per_word, and its numbers are separated by spaces. The network
computes in float32, regardless of the run's --precision.
"""

import contextlib
import dataclasses
import signal

from lm.cli import program
from lm.cli.parser import RunChoice, parse
from lm.config import MAX_ROWS
from lm.options import Checked, option
from lm.system import import_tensorflow

_STDIN = 0  # the file descriptor


@dataclasses.dataclass(frozen=True)
class ScoreOptions(Checked):
    """The flags of this command."""

    per_word: bool = option(False, "also print the log-probability of each token")
    batch_size: int = option(16, "number of texts to score together", low=1, high=MAX_ROWS)


def _score(argv):
    arguments = parse(argv, __doc__, RunChoice, ScoreOptions)
    run, options = arguments[RunChoice].open_arguments(), arguments[ScoreOptions]
    import_tensorflow()
    from lm.inference.scorer import Scorer
    from lm.inference.trained_run import open_run

    with contextlib.closing(Scorer(open_run(**run), options.batch_size)) as scorer:
        for score in scorer.score_stream(_STDIN):
            # The process that wrote the sentence may wait for the score.
            print(format_score(score, options.per_word), flush=True)


def format_score(score, per_word: bool) -> str:
    cells = [f"{score.log_prob:.6f}", str(len(score.log_probs)), str(score.unknown)]
    cells.append(" ".join(score.text.split()))
    if per_word:
        cells.append(" ".join(f"{log_prob:.6f}" for log_prob in score.log_probs))
    return "\t".join(cells)


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Stop silently when `| head` closes stdout.
    program.run_alone(_score)


if __name__ == "__main__":
    main()
