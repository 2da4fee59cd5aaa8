"""Export a trained model as a SavedModel, which TensorFlow loads without this project.

  python -m lm.export --run runs/small --to exported/small

The network computes in float32, regardless of the run's --precision:

  import tensorflow as tf
  model = tf.saved_model.load("exported/small")
  score = model.signatures["score"]
  scores = score(words=tf.constant([["the", "company", "said"], ["yes", "", ""]]))

The SavedModel has the following signatures. B is the number of texts or rows, T is the number of
tokens, S is the number of values in the state of a row, and V is the number of tokens in the
vocabulary. All logarithms are natural.

  score_ids   ids: int32 [B, T], negative after the end of a text
              -> log_probabilities: float32 [B, T + 1], of each token and of the closing separator,
                 followed by zeros; log_probability: float32 [B], their sum
  next_id     ids: int32 [B]; state: float32 [B, S]. A text starts with the separator and a state of
              zeros.
              -> log_probabilities: float32 [B, V], of the next token; state: for the next call

With the tokenizer words, the separator is <eos>, and two more signatures accept strings. They
return the same values:

  score       words: string [B, T], "" after the end of a text
  next_word   words: string [B]; state: float32 [B, S]

The ID of a word is the number of its line in assets/vocabulary.txt, counted from 0. A word that is
not in the vocabulary is replaced by <unk>. If the vocabulary does not contain <unk>, this word is
an error. With other tokenizers, the separator is the line end, or <|endoftext|>, </s> or a similar
token of the tokenizer. The run directory contains the tokenizer.

The state of the LSTM has S = layers * 2 * hidden_size values: h and c of the first layer, then h
and c of the second layer, and so on. The state of a user-defined network consists of the flattened
parts of the states in its state_shapes. If the network defines reads_words, the state instead
consists of the IDs of the last tokens, each increased by 1. The bits of integers are stored as
float32 values.

With --format tf1, the export is a checkpoint that the TF 1.x program of a user-defined network
restores with tf.train.Saver; see docs/own_graph.md.
"""

import dataclasses

from lm.cli import program
from lm.cli.parser import RunChoice, parse
from lm.options import Checked, option
from lm.system import import_tensorflow


@dataclasses.dataclass(frozen=True)
class ExportOptions(Checked):
    """The flags of this command."""

    to: str = option("", "new directory for the export", required=True, is_path=True)
    format: str = option(
        "saved_model", "saved_model, or tf1: a checkpoint that the TF 1.x program of the network"
        " restores", choices=("saved_model", "tf1"),
    )  # fmt: skip
    rows: int | None = option(
        None, "number of rows B that the SavedModel accepts (default: any number)", low=1
    )


def _export(argv):
    arguments = parse(argv, __doc__, RunChoice, ExportOptions)
    run, options = arguments[RunChoice].open_arguments(), arguments[ExportOptions]
    import_tensorflow()
    from lm.inference import saved_model, tf1_checkpoint
    from lm.inference.trained_run import open_run

    if options.format == "tf1":
        tf1_checkpoint.export(open_run(**run), options.to)
    else:
        saved_model.export(open_run(**run), options.to, options.rows)


def main() -> None:
    program.run_alone(_export)


if __name__ == "__main__":
    main()
