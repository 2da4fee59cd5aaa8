"""Print the log-probability of each sentence on stdin, one sentence per line.

  python -m lm.score --run runs/small < sentences.txt > scores.tsv
  nbest | python -m lm.score --run runs/small --per_word --json

Each input line produces one output line immediately. The TSV columns, without a header, are:

  log-probability, tokens, unknown words, sentence [, log-probabilities of its tokens]

All logarithms are natural. A sentence starts with an empty recurrent state, and the closing <eos>
is a token of the sentence. A word that is not in the vocabulary counts as unknown and is scored as
<unk>. The last column requires --per_word, and spaces separate the numbers in this column. The
words of the sentence are separated by single spaces. The network computes in float32, regardless
of the run's --precision.

With --json, each line is an object, which contains the words if --per_word is set. A
log-probability of minus infinity is null:

  {"log_probability": -9.1, "tokens": 3, "unknown": 0, "sentence": "the company",
   "words": [{"word": "the", "log_probability": -3.0}, ..., {"word": "<eos>", ...}]}
"""

import contextlib
import dataclasses
import json
import math
import signal

from lm.cli import program
from lm.cli.flags import RunChoice, parse
from lm.data.vocabulary import EOS
from lm.options import Checked, option
from lm.system import import_tensorflow

_STDIN = 0  # the file descriptor


@dataclasses.dataclass(frozen=True)
class ScoreOptions(Checked):
    """The flags of this command."""

    per_word: bool = option(False, "print the log-probability of each word too")
    json: bool = option(False, "print JSON, one object per line, instead of TSV")
    batch_size: int = option(16, "number of sentences to score together", low=1)


def _score(argv):
    arguments = parse(argv, __doc__, RunChoice, ScoreOptions)
    run, options = arguments[RunChoice].open_arguments(), arguments[ScoreOptions]
    import_tensorflow()
    from lm.inference.run import open_run
    from lm.inference.scorer import Scorer

    with contextlib.closing(Scorer(open_run(**run), options.batch_size)) as scorer:
        for score in scorer.score_stream(_STDIN):
            # The process that wrote the sentence may wait for the score.
            print(format_score(score, options.per_word, options.json), flush=True)


def format_score(score, per_word: bool, as_json: bool) -> str:
    """Return the output line of a sentence."""
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


def _number(log_prob: float) -> float | None:
    # JSON cannot represent infinity.
    return round(float(log_prob), 6) if math.isfinite(log_prob) else None


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Stop silently when `| head` closes stdout.
    program.run_alone(_score)
