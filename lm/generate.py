"""Text from a run: `python -m lm.generate --run DIR --prompt "the company said"`.

The text goes to stdout as it is drawn: the prompt, then --num_words words, where the end of a
line (`<eos>`) counts as one. With --num_samples above 1 each text follows a line "== 2 of 5".
With --json, one object per line for each sample: {"sample": 1, "seed": 7, "prompt": "the company
said", "words": ["it", "will", "<eos>"], "text": "the company said it will\\n"}.

The model computes in float32, whatever the run's --precision.
"""

import dataclasses
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

The same flags give the same text, given a --seed."""


@dataclasses.dataclass(frozen=True)
class OutputFormat(Checked):
    """The output format."""

    json: bool = option(False, "print JSON, one object per line for each text")


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other tools
    program.run_alone(_generate)


def _generate(argv):
    arguments = parse(argv, USAGE, RunChoice, Sampling, OutputFormat)
    sampling = arguments[Sampling]
    import_tensorflow()
    from lm.inference.generator import Generator
    from lm.inference.run import open_run

    run = open_run(**arguments[RunChoice].open_arguments())
    if "seed" not in arguments.given(Sampling):  # so that the user can repeat the text
        logging.getLogger("lm").info("seed %d", sampling.seed)
    for number, words in enumerate(Generator(run).texts(sampling), 1):
        _print(number, words, sampling, arguments[OutputFormat].json)


def _print(number, words, sampling, as_json):
    from lm.inference.generator import spaced

    if as_json:
        words = list(words)
        record = {"sample": number, "seed": sampling.seed, "prompt": sampling.prompt}
        drawn, text = words[-sampling.num_words :], "".join(spaced(words))
        print(json.dumps({**record, "words": drawn, "text": text}), flush=True)
        return
    if sampling.num_samples > 1:
        print(f"== {number} of {sampling.num_samples}")
    for piece in spaced(words):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
