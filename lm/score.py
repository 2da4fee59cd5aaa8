"""Print the log-probability of each text on stdin, one text per line.

  python -m lm.score --run runs/small < sentences.txt > scores.tsv
  python -m lm.score --run runs/small --format kenlm < sentences.txt
  python -m lm.score --run runs/small --nbest list.txt --weight 0.5 > rescored.txt

The command prints one line for each input line, as soon as it has read the input line. With
--format tsv, the output has no header and these columns, which are separated by tabs:

  log-probability, tokens, unknown, text [, log-probabilities of its tokens]

These logarithms are natural. The tokenizer of the run divides each text into tokens. The line end
of the text is scored too; for the tokenizer words, it is the token <eos>. Words or characters that
are not in the vocabulary count as unknown and are scored as <unk>. In the text column, all white
space is replaced by single spaces. The last column is printed only with --per_word, and its numbers
are separated by spaces. At the end, the totals of all texts appear on stderr.

Texts are not quoted: read this format with quoting=3 in pandas, or quote="" in R.

With --format json, each line is an object with these values, and the last line is an object with
the field "total". With --per_word, "token_texts" contains the characters that each token completes:
a new word starts with a space, except at the start of the text.

--format kenlm prints the format of KenLM's program `query`, with logarithms to base 10. A word is
printed as word=ID length log10-probability. The ID is 0 for unknown words, and otherwise the token
ID plus 1. The length is the number of tokens from the start of the text to the word, including the
start. Unlike in the columns above, an <unk> in the text counts as unknown too, as in KenLM. The
last lines contain the perplexities with and without unknown words.

By default, texts are independent: the recurrent state is empty at the start of each text. With
--continuous, the state at the end of a text continues in the next text, as in lm.evaluate with
--eval_batch_size 1. To read several sentences as one text, write them into one line, with <eos>
between them if the tokenizer is words. Each text is divided into tokens separately, so the totals
differ from lm.evaluate if a subword tokenizer has tokens that contain several line ends. If the
network of a config file defines reads_words, each token is predicted from the last K tokens, while
lm.evaluate reads windows of num_steps tokens separately. The perplexity of lm.evaluate is then
usually higher.

Several processes can score parts of a large file, each on its own core. A list of an n-best file
must stay in one part.

  split -n l/4 -d -a1 sentences.txt part.
  for i in 0 1 2 3; do taskset -c $i python -m lm.score --run RUN < part.$i > scores.$i & done; wait

--nbest FILE reads lists in the format of Moses, `id ||| text ||| features [||| score]`, and the
standard input if FILE is -. Each line gets a feature `lm`, the natural log-probability of its text,
and its score increases by --weight times this number. The lines of each list are sorted by this
score. The network computes in float32, regardless of the run's --precision.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import signal
import sys

import numpy as np

from lm import logger
from lm.cli import program
from lm.cli.parser import RunChoice, parse
from lm.config import MAX_ROWS
from lm.errors import UserError, needs_extra
from lm.inference.lines import STDIN, name_of, read_lines
from lm.inference.prompts import decode_stream
from lm.options import Checked, option
from lm.perplexity import NllSum
from lm.tensorflow_import import import_tensorflow


@dataclasses.dataclass(frozen=True)
class ScoreOptions(Checked):
    """The flags of this command."""

    format: str = option(
        "tsv", "tsv, json, or kenlm (the output of KenLM's query)",
        choices=("tsv", "json", "kenlm"),
    )  # fmt: skip
    per_word: bool = option(False, "also print the log-probability of each token")
    continuous: bool = option(
        False, "continue the recurrent state of a text in the next text (default: independent)"
    )
    nbest: str | None = option(
        None, "rescore the n-best lists in this file; - reads the standard input", is_path=True
    )
    weight: float = option(1.0, "--nbest: weight of the log-probability in the score")
    html: str | None = option(
        None, "also write the texts to a page that shows the surprisal of each token", is_path=True
    )
    batch_size: int = option(16, "number of texts to score together", low=1, high=MAX_ROWS)


def _score(argv):
    arguments = parse(argv, __doc__, RunChoice, ScoreOptions)
    run, options = arguments[RunChoice].open_arguments(), arguments[ScoreOptions]
    others = ("html", "continuous", "per_word", "format")
    if options.nbest and any(getattr(options, n) != getattr(ScoreOptions(), n) for n in others):
        raise UserError(
            "--nbest cannot be combined with --html, --continuous, --per_word, --format"
        )
    if options.html:
        with needs_extra("report"):  # fail now, not after all texts are scored
            import lm.report.page  # noqa: F401
    import_tensorflow()
    from lm.inference.scorer import Scorer
    from lm.inference.trained_run import open_run

    opened = open_run(**run)
    with contextlib.closing(Scorer(opened, options.batch_size, options.continuous)) as scorer:
        if options.nbest:
            _rescore(scorer, options)
            return
        texts = _print_scores(scorer, opened.tokenizer, options)
    if options.html:
        _write_page(opened, texts, options)


def _rescore(scorer, options):
    from lm.inference.nbest import rescore

    lines = itertools.chain.from_iterable(read_lines(options.nbest))
    for line in rescore(lines, scorer, options.weight, name_of(options.nbest)):
        print(line)


def _print_scores(scorer, tokenizer, options):
    """Print the scores of the lines of the standard input. Return their token IDs for --html."""
    totals, texts, count = Totals(tokenizer.unk_id), [], 0
    if sys.stdin.isatty():
        logger.info("reading texts from the terminal, one per line, until Ctrl-D")
    for lines in read_lines(STDIN):
        is_text = tokenizer.name not in ("words", "ids")
        if not count and is_text and any(line.endswith("\r") for line in lines):
            logger.warning(
                "the lines end in \\r, as in Windows files, and \\r is scored too: unless the"
                " training text has such line ends, remove them with tr -d '\\r'"
            )
        for score in scorer.score(lines, f"{name_of(STDIN)}, line", count + 1):
            totals.add(score)
            # The process that wrote the sentence may wait for the score.
            print(format_score(score, options, tokenizer), flush=True)
            if options.html:
                texts.append(score.ids.tolist())
            count += 1
    values = totals.as_dict()
    if options.format == "kenlm":
        print(totals.as_kenlm())
    elif options.format == "json":
        print(json.dumps({"total": values}))
    else:
        logger.info(" ".join(f"{k} {v:.8g}" for k, v in values.items() if v is not None))
    return texts


def _write_page(run, texts, options):
    from lm.inference.generator import Generator
    from lm.report.examples import text_part
    from lm.report.page import build_page, write_file

    if options.continuous:
        texts = [list(itertools.chain.from_iterable(texts))]
    with contextlib.closing(Generator(run)) as reader:
        part = text_part("Texts", itertools.chain.from_iterable(map(reader.predictions, texts)))
    write_file(options.html, build_page(f"Texts, read by {run.directory}", [part]))
    logger.info("wrote %s", options.html)


class Totals:
    """Sums over all texts."""

    def __init__(self, unk_id: int | None):
        self._unk_id, self._known, self._all, self._unknown = unk_id, NllSum(), NllSum(), 0

    def add(self, score) -> None:
        known = score.log_probs[score.ids != self._unk_id]
        self._all += NllSum(-score.log_prob, len(score.ids))
        self._known += NllSum(-float(known.sum()), len(known))
        self._unknown += score.unknown

    def as_dict(self) -> dict[str, float | None]:
        """Return the totals. The perplexity is None if there are no tokens, or if it overflows."""
        perplexity = self._all.perplexity
        return {
            "log_probability": 0.0 - self._all.nats,
            "tokens": self._all.tokens,
            "unknown": self._unknown,
            "perplexity": perplexity if math.isfinite(perplexity) else None,
        }

    def as_kenlm(self) -> str:
        """Return the last lines of KenLM's query."""
        return (
            f"Perplexity including OOVs:\t{self._all.perplexity}\n"
            f"Perplexity excluding OOVs:\t{self._known.perplexity}\n"
            f"OOVs:\t{self._all.tokens - self._known.tokens}\nTokens:\t{self._all.tokens}"
        )


def format_score(score, options: ScoreOptions, tokenizer) -> str:
    """Return the line of the output for a text."""
    if options.format == "kenlm":
        return _kenlm_line(score, tokenizer)
    if options.format == "tsv":
        cells = [f"{score.log_prob:.6f}", str(len(score.ids)), str(score.unknown)]
        cells.append(" ".join(score.text.split()))
        if options.per_word:
            cells.append(" ".join(f"{log_prob:.6f}" for log_prob in score.log_probs))
        return "\t".join(cells)
    values = {
        "text": score.text,
        "log_probability": score.log_prob,
        "tokens": len(score.ids),
        "unknown": score.unknown,
    }
    if options.per_word:
        values["token_log_probabilities"] = score.log_probs.tolist()
        values["token_texts"] = [*decode_stream(tokenizer, score.ids)][: len(score.ids)]
    return json.dumps(values)


def _kenlm_line(score, tokenizer) -> str:
    # KenLM prints the shortest decimal number that is equal to the value in float32.
    log10s = (score.log_probs / math.log(10)).astype(np.float32)
    total = np.float32(score.log_prob / math.log(10))
    words = [tokenizer.tokens[i] for i in score.ids]
    if tokenizer.name == "words":
        words = [*score.text.split(), "</s>"]  # unknown words too
    cells = []
    for position, (word, token, log10) in enumerate(zip(words, score.ids, log10s), 2):
        word = "".join("_" if c.isspace() else c for c in word) or "_"
        number = 0 if token == tokenizer.unk_id else token + 1
        cells.append(f"{word}={number} {position} {log10!s}")
    num_unknown = np.count_nonzero(score.ids == tokenizer.unk_id)
    return "\t".join([*cells, f"Total: {total!s} OOV: {num_unknown}"])


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Stop silently when `| head` closes stdout.
    program.run_alone(_score)


if __name__ == "__main__":
    main()
