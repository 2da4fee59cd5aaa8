"""Text from a run: `python -m lm.generate --run DIR --prompt "the company said"`.

The text goes to stdout as it is drawn: the prompt, then --num_words words, where the end of a
line (`<eos>`) counts as one. With --num_samples above 1 each text follows a line "== 2 of 5".
With --json, one object per line for each sample: {"sample": 1, "seed": 7, "prompt": "the company
said", "words": ["it", "will", "<eos>"], "text": "the company said it will\\n"}.

The model computes in float32, whatever the run's --precision.
"""

import json
import logging
import signal

from lm.cli import program
from lm.cli.flags import run_arguments, run_flags
from lm.system import import_tensorflow

USAGE = """\
Generate text with a trained model.

  python -m lm.generate --run runs/small --prompt "the company said" --num_words 100
  python -m lm.generate --run runs/small --temperature 0.8 --top_k 40 --top_p 0.9 --seed 1

The same flags give the same text, given a --seed."""


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other tools
    program.run_alone(_generate)


def _generate(argv):
    from lm.inference.sampling import Sampling

    flags = run_flags(USAGE)
    flags.define_fields(Sampling)
    flags.define(bool, "json", False, "print JSON, one object per line for each text")
    flags.parse(argv)
    sampling = Sampling(**flags.given(Sampling))
    import_tensorflow()
    from lm.inference.generator import Generator
    from lm.inference.run import open_run

    run = open_run(**run_arguments(flags))
    if flags["seed"] is None:  # told, so that a text worth keeping can be had again
        logging.getLogger("lm").info("seed %d", sampling.seed)
    for number, words in enumerate(Generator(run).texts(sampling), 1):
        _print(number, words, sampling, flags["json"])


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
