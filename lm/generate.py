"""Generate text with a trained model.

  python -m lm.generate --run runs/small --prompt "the company said" --num_words 100
  python -m lm.generate --run runs/small --temperature 0.8 --top_k 40 --top_p 0.9 --seed 1
  python -m lm.generate --run runs/small --prompts prompts.txt --num_samples 4 --json
  python -m lm.generate --run runs/small < prompts.txt
  python -m lm.generate --run runs/small --prompt "the company said" --beam_size 8 --stop_at_eos
  python -m lm.generate --run runs/small --prompt "the company" --next 10

The prompt is ordinary text. The tokenizer of the run divides it into tokens. --num_words is the
number of tokens to generate, including line ends. --prompts reads one prompt per line. Without
--prompt and --prompts, the command reads prompts from the standard input if this is a pipe or a
file. The command generates the texts of several prompts together, in batches.

A single text is printed while it is generated, one token at a time. Several texts are printed when
they are complete, in the order of the prompts. With --json, the command prints one line with a JSON
object for each text. Its prompt consists of the tokens that the model read, so an unknown word is
<unk>. log_probability is the natural logarithm of the probability of all generated tokens, before
the temperature and the other settings change it:

  {"prompt": "the company", "text": " said it", "log_probability": -4.21}

With --next N, nothing is generated. The command prints the N most probable tokens after each prompt
with their probabilities. With --json, these are pairs in the field "next".

The same flags with the same --seed generate the same text. A text depends only on the seed, on the
prompt, on the line number of the prompt and on the number of the sample. The other texts of its
batch change probabilities only by rounding. The network computes in float32, regardless of the
run's --precision.
"""

import contextlib
import dataclasses
import json
import os
import signal
import stat
import sys

from lm import logger
from lm.cli import program
from lm.cli.parser import RunChoice, parse
from lm.config import MAX_ROWS
from lm.errors import UserError, printable
from lm.inference.lines import STDIN, read_lines
from lm.inference.sampling import Sampling
from lm.options import Checked, option
from lm.tensorflow_import import import_tensorflow


@dataclasses.dataclass(frozen=True)
class GenerateOptions(Checked):
    """The flags of this command."""

    prompt: str | None = option(None, "text to continue (default: the start of a text)")
    prompts: str | None = option(
        None,
        "file with one prompt per line; - is the standard input, which is also the default if it is"
        " a pipe or a file",
        is_path=True,
    )
    json: bool = option(False, "print JSON, one object per text")
    next: int = option(0, "print the N most probable next tokens instead of a text", low=0)
    batch_size: int = option(32, "number of texts to generate together", low=1, high=MAX_ROWS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.prompts:
            raise UserError("--prompt and --prompts are both given: leave out one of them")


def _is_piped() -> bool:
    """Return whether the standard input is a pipe or a file. It may also be closed."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _generate(argv):
    arguments = parse(argv, __doc__, RunChoice, GenerateOptions, Sampling)
    run, how, options = (arguments[cls] for cls in (RunChoice, Sampling, GenerateOptions))
    if options.prompt is None and not options.prompts and _is_piped():
        logger.info("reading one prompt per line from the standard input")
        options = dataclasses.replace(options, prompts=STDIN)
    import_tensorflow()
    from lm.inference.generator import Generator
    from lm.inference.trained_run import open_run

    is_single = not options.prompts and (how.num_samples == 1 or options.next)
    rows = how.beam_size or (1 if is_single else options.batch_size)
    with contextlib.closing(Generator(open_run(**run.open_arguments()), rows)) as generator:
        if not (options.next or how.beam_size):
            logger.info("seed %d", how.seed)  # for generating the text again
            if is_single and not (options.json or how.stop):
                _print_text(generator.stream(options.prompt or "", how))
                return
        first = 0
        for prompts in read_lines(options.prompts) if options.prompts else [[options.prompt or ""]]:
            prompts = [prompt.removesuffix("\r") for prompt in prompts]  # of Windows line ends
            if options.next:
                found = generator.next_tokens(prompts, options.next, first)
                _print_next(prompts, found, options.json)
            else:
                _print_texts(generator.generate(prompts, how, first), options, how, first)
            first += len(prompts)


def _print_texts(texts, options, how, first):
    for index, text in enumerate(texts):
        if options.json:
            print(json.dumps(text._asdict()), flush=True)
            continue
        prompt, sample = divmod(index, how.num_samples)
        titles = [f"prompt {first + prompt + 1}"] if options.prompts else []
        titles += [f"{sample + 1} of {how.num_samples}"] if how.num_samples > 1 else []
        if titles:
            print("==", ", ".join(titles))
        _print_text([text.prompt, text.text])


def _print_next(prompts, found, as_json):
    for prompt, tokens in zip(prompts, found):
        if as_json:
            print(json.dumps({"prompt": prompt, "next": tokens}), flush=True)
            continue
        for token, probability in tokens:
            print(f"{probability:.6f}  {json.dumps(token, ensure_ascii=False)}", flush=True)


def _print_text(pieces):
    last = ""
    for piece in pieces:
        last = piece or last
        shown = printable(piece, kept="\n\t\r") if sys.stdout.isatty() else piece
        print(shown, end="", flush=True)
    if not last.endswith("\n"):
        print()


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Stop silently when `| head` closes stdout.
    program.run_alone(_generate)


if __name__ == "__main__":
    main()
