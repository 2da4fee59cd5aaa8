"""Generate text with a trained model.

  python -m lm.generate --run runs/small --prompt "the company said" --num_words 100
  python -m lm.generate --run runs/small --temperature 0.8 --top_k 40 --top_p 0.9 --seed 1

The prompt is ordinary text. The tokenizer of the run divides it into tokens. --num_words is the
number of tokens to generate, including line ends. The text of each token is printed as soon as its
characters are complete.

The same flags with the same --seed generate the same text. The network computes in float32,
regardless of the run's --precision.
"""

import contextlib
import signal
import sys

from lm import logger
from lm.cli import program
from lm.cli.parser import RunChoice, parse
from lm.errors import printable
from lm.inference.sampling import Sampling
from lm.system import import_tensorflow


def _generate(argv):
    arguments = parse(argv, __doc__, RunChoice, Sampling)
    run, sampling = arguments[RunChoice].open_arguments(), arguments[Sampling]
    import_tensorflow()
    from lm.inference.generator import Generator
    from lm.inference.trained_run import open_run

    with contextlib.closing(Generator(open_run(**run))) as generator:
        logger.info("seed %d", sampling.seed)  # for generating the text again
        for number, pieces in enumerate(generator.texts(sampling), 1):
            if sampling.num_samples > 1:
                print(f"== {number} of {sampling.num_samples}")
            _print_text(pieces)


def _print_text(pieces):
    last = ""
    for piece in pieces:
        last = piece or last
        if sys.stdout.isatty():
            piece = printable(piece, kept="\n")
        print(piece, end="", flush=True)
    if not last.endswith("\n"):
        print()


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Stop silently when `| head` closes stdout.
    program.run_alone(_generate)


if __name__ == "__main__":
    main()
