"""Write a synthetic corpus, whose true perplexity is known.

  python -m lm.synthesize --output_dir data/synthetic --num_words 30000 --num_tokens 5_000_000
  python -m lm.train --data_path data/synthetic

Each token may be followed by only --num_successors tokens. Training prints the perplexity of a
model that knows their probabilities (`true: 7.05`).
"""

import dataclasses

from lm.cli import program
from lm.cli.parser import parse
from lm.data.embedded import LanguageOptions, write_corpus
from lm.options import Checked, option


@dataclasses.dataclass(frozen=True)
class OutputChoice(Checked):
    """The flag that selects the directory."""

    output_dir: str = option(
        "", "new directory of the corpus: the --data_path of lm.train", required=True, is_path=True
    )


def _synthesize(argv):
    arguments = parse(argv, __doc__, OutputChoice, LanguageOptions)
    directory = arguments[OutputChoice].output_dir
    known = write_corpus(directory, arguments[LanguageOptions])
    print(
        f"wrote {directory}: true perplexity {known.valid_perplexity:.2f} (validation),"
        f" {known.test_perplexity:.2f} (test)"
    )


def main() -> None:
    program.run_alone(_synthesize)


if __name__ == "__main__":
    main()
