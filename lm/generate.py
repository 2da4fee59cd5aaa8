"""Generate text: `python -m lm.generate --run DIR --prompt "the company said"`.

The text is printed while it is generated: the prompt, then --num_words words. A line end (`<eos>`)
counts as a word. If --num_samples is above 1, each text follows a line like "== 2 of 5". With
--json, each text is a line {"sample": 1, "seed": 7, "prompt": "the company said", "words": ["it",
"will", "<eos>"], "text": "the company said it will\\n"}.

The network computes in float32, regardless of the run's --precision.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import signal

from lm.cli import program
from lm.cli.flags import RunChoice, parse
from lm.inference.sampling import Sampling
from lm.options import Checked, option
from lm.system import import_tensorflow

USAGE = """\
Generate text with a trained model.

  python -m lm.generate --run runs/small --prompt "the company said" --num_words 100
  python -m lm.generate --run runs/small --temperature 0.8 --top_k 40 --top_p 0.9 --seed 1

With the same --seed, the same flags generate the same text."""


@dataclasses.dataclass(frozen=True)
class OutputFormat(Checked):
    """The output format."""

    json: bool = option(False, "print JSON, one object per line for each text")


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # stop silently if stdout is closed, as by head
    program.run_alone(_generate)


def _generate(argv):
    arguments = parse(argv, USAGE, RunChoice, Sampling, OutputFormat)
    run, sampling = arguments[RunChoice].open_arguments(), arguments[Sampling]
    import_tensorflow()
    from lm.inference.generator import Generator
    from lm.inference.run import open_run

    with contextlib.closing(Generator(open_run(**run))) as generator:
        if "seed" not in arguments.given(Sampling):  # the user may want to repeat the text
            logging.getLogger("lm").info("seed %d", sampling.seed)
        for number, (prompt, words) in enumerate(generator.texts(sampling), 1):
            if arguments[OutputFormat].json:
                _print_json(number, prompt, list(words), sampling)
            else:
                _print_text(number, [prompt, words], sampling.num_samples)


def _print_json(number, prompt, words, sampling):
    from lm.inference.generator import spaced

    record = {"sample": number, "seed": sampling.seed, "prompt": sampling.prompt, "words": words}
    print(json.dumps({**record, "text": "".join(spaced([*prompt, *words]))}), flush=True)


def _print_text(number, parts, num_samples):
    from lm.inference.generator import spaced

    if num_samples > 1:
        print(f"== {number} of {num_samples}")
    for piece in spaced(itertools.chain(*parts)):
        print(piece, end="", flush=True)
    if piece != "\n":
        print()


if __name__ == "__main__":
    main()
