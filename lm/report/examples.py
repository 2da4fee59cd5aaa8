"""Texts for the page: tokens with their surprisal, and samples of runs."""

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lm import logger
from lm.errors import short_message
from lm.report.comparison import Section
from lm.report.metrics import RunMetrics
from lm.report.page import Part
from lm.tensorflow_import import import_tensorflow

if TYPE_CHECKING:
    from lm.inference.generator import Prediction

_NUM_TOKENS = 300
_FULL_BITS = 16.0  # the surprisal with the darkest color
_NOTE = (
    "The darker a token, the less the model expected it. The pointer on a token shows its surprisal"
    " and the five tokens that the model considered most probable."
)


def text_part(title: str, predictions: Iterable["Prediction"]) -> Part:
    """Return a text in which the color of each token shows its surprisal."""
    tokens, bits = [], 0.0
    for found in predictions:
        bits += found.bits
        if not found.text:  # a part of a character, which the next tokens complete
            continue
        lines = [f"{bits:.2f} bits"]
        lines += [
            f"{probability:6.1%}  {json.dumps(text, ensure_ascii=False)}"
            for text, probability in found.expected
        ]
        share = 100 * min(bits / _FULL_BITS, 1) if math.isfinite(bits) else 100
        bits = 0.0
        tokens.append({"text": found.text, "share": f"{share:.0f}", "tip": "\n".join(lines)})
    return Part(title, [_NOTE], tokens=tokens)


def example_parts(sections: Sequence[Section], shows_licensed: bool) -> Iterator[Part]:
    """Yield the start of the validation text and a sample of the best run of each section.

    Runs without a checkpoint or a corpus and runs that need a config file are left out. Licensed
    text is left out by default.
    """
    for section in sections:
        # A config file is not executed, because a report may be of anyone's runs.
        runs = [r for r in section.runs if r.checkpoint_steps and not r.record.config_file]
        if not runs:
            logger.info("no examples: all runs need a config file or have no checkpoint")
            continue
        run = min(runs, key=lambda run: run.valid_perplexity)
        is_licensed = run.record.corpus.kind == "ptb"
        if is_licensed and shows_licensed:
            logger.warning("the page contains licensed text of PTB: do not publish it")
        try:
            yield from _parts(run, shows_text=shows_licensed or not is_licensed)
        except Exception as error:  # the page is complete without examples
            logger.warning("no examples of %s: %s", run.name, short_message(error))


def _parts(run: RunMetrics, shows_text: bool) -> Iterator[Part]:
    import_tensorflow()
    from lm.inference.evaluation import load_text
    from lm.inference.generator import Generator
    from lm.inference.sampling import Sampling
    from lm.inference.trained_run import open_run

    opened = open_run(run.directory, "best" if run.tests_best else "last")
    with contextlib.closing(Generator(opened)) as generator:
        if shows_text:
            ids = itertools.islice(load_text(opened, "valid").ids, _NUM_TOKENS)
            yield text_part(f"Validation text, read by {run.name}", generator.predictions(ids))
        (sample,) = generator.generate([""], Sampling(num_words=_NUM_TOKENS, seed=1))
        yield Part(f"Sample of {run.name}", code=sample.text)
