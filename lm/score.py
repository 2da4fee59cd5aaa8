"""Log-probabilities of sentences on stdin: `python -m lm.score --run DIR < sentences.txt`.

One line out for each line in, as soon as it can be had. TSV columns, without a header:

    log-probability, tokens, unknown words, sentence [, log-probabilities of its tokens]

All logarithms are natural. A sentence starts after an `<eos>` with an empty state, and its
closing `<eos>` is one of its tokens. A word that is not in the vocabulary counts as unknown and
is scored as `<unk>`. The last column, of --per_word, has a number for each token, separated by
spaces. The sentence is printed with single spaces between its words. The model computes in
float32, whatever the run's --precision.

With --json one object per line: {"log_probability": -9.1, "tokens": 3, "unknown": 0, "sentence":
"the company"}, and with --per_word also "words": [{"word": "the", "log_probability": -3.0}, ...,
{"word": "<eos>", "log_probability": -2.2}]. A log-probability of minus infinity is null.
"""

import dataclasses
import json
import math
import signal
import sys
from typing import Optional

from lm.cli import program
from lm.cli.flags import RunChoice, parse
from lm.data.vocabulary import EOS
from lm.errors import UserError
from lm.options import Checked, option
from lm.system import import_tensorflow

USAGE = """\
Print the log-probability of each sentence on stdin, one sentence per line.

  python -m lm.score --run runs/small < sentences.txt > scores.tsv
  nbest | python -m lm.score --run runs/small --per_word --json

TSV: log-probability (natural), tokens (with <eos>), unknown words, sentence."""


@dataclasses.dataclass(frozen=True)
class ScoreOptions(Checked):
    """The output format and the batch size."""

    per_word: bool = option(False, "print the log-probability of each word too")
    json: bool = option(False, "print JSON, one object per line, instead of TSV")
    batch_size: int = option(16, "sentences scored at a time", low=1)


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other tools
    program.run_alone(_score)


def _score(argv):
    arguments = parse(argv, USAGE, RunChoice, ScoreOptions)
    run, options = arguments[RunChoice].open_arguments(), arguments[ScoreOptions]
    if sys.stdin is None:
        raise UserError("stdin is closed: give it the sentences, one a line")
    import_tensorflow()
    from lm.inference.run import open_run
    from lm.inference.scorer import Scorer

    scorer = Scorer(open_run(**run), options.batch_size)
    for score in scorer.score_stream(sys.stdin.fileno()):
        # Whoever wrote this line may wait for the answer.
        print(format_score(score, options.per_word, options.json), flush=True)


def format_score(score, per_word: bool, as_json: bool) -> str:
    """Return the line that is printed for a sentence."""
    sentence = " ".join(score.words)
    if not as_json:
        numbers = [f"{score.log_prob:.6f}", str(len(score.log_probs)), str(score.unknown)]
        by_word = [" ".join(f"{value:.6f}" for value in score.log_probs)] if per_word else []
        return "\t".join([*numbers, sentence, *by_word])
    record = {
        "log_probability": _number(score.log_prob),
        "tokens": len(score.log_probs),
        "unknown": score.unknown,
        "sentence": sentence,
    }
    if per_word:
        record["words"] = [
            {"word": word, "log_probability": _number(value)}
            for word, value in zip([*score.words, EOS], score.log_probs)
        ]
    return json.dumps(record)


def _number(log_prob: float) -> Optional[float]:
    return round(float(log_prob), 6) if math.isfinite(log_prob) else None  # JSON has no infinity


if __name__ == "__main__":
    main()
