"""Text from a run: `python -m lm.generate --run DIR --prompt "the company said"`.

The text goes to stdout as it is drawn: the prompt, then --num_words words, where the end of a
line (`<eos>`) counts as one. With --num_samples above 1 each text follows a line "== 2 of 5".
With --json, one object a line for each sample: {"sample": 1, "seed": 7, "prompt": "the company
said", "words": ["it", "will", "<eos>"], "text": "the company said it will\\n"}.
"""

import signal

from lm.cli import program
from lm.distributed.startup import import_tensorflow

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
    import_tensorflow()
    from lm.cli.flags import Flags
    from lm.inference.generator import run_generation
    from lm.inference.run import define_run_flags

    flags = Flags(USAGE)
    define_run_flags(flags)
    flags.define(str, "prompt", "", "words to go on from (default: the start of a sentence)")
    flags.define(int, "num_words", 100, "words of each text (default: 100)")
    flags.define(int, "num_samples", 1, "texts (default: 1)")
    flags.define(float, "temperature", 1.0, "below 1: safer words; 0: always the most probable")
    flags.define(int, "top_k", 0, "draw from so many most probable words (default: 0, all)")
    flags.define(float, "top_p", 1.0, "draw from the fewest words of this probability together")
    flags.define(int, "seed", None, "of the draws (default: a new one, which is told)")
    flags.define(bool, "allow_unk", False, "generate <unk> too")
    flags.define(bool, "json", False, "print JSON, an object a line for each text")
    flags.parse(argv)

    run_generation(flags)


if __name__ == "__main__":
    main()
