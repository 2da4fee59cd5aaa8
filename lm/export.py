"""Export a trained model as a SavedModel, which TensorFlow loads without this project.

  python -m lm.export --run runs/small --to exported/small
  python -m lm.export --run runs/small --to small.npz --format npz

With --format npz or safetensors, the command writes a file with the weights for other frameworks.
The name of each weight is the name of its variable. If the run has averages of its weights, they
are exported. With V words, embeddings of size E and H units, the built-in network has these
weights, except for an adaptive softmax or input:

  embedding [V, E]; softmax/weights [H, V] and softmax/bias [V]. With --tie_weights, there is no
      softmax/weights, and if E differs from H, there is softmax/projection [H, E].
  lstm_0/input_weights [E, 4H], and in later layers [H, 4H]; lstm_N/recurrent_weights [H, 4H] and
      lstm_N/bias [4H]. Their columns are the input gate, the candidate, the forget gate and the
      output gate.

torch.nn.LSTM has the transposed weights, with the candidate after the forget gate, and a second
bias, which must be 0. If the run has --forget_bias, add it to the bias of the forget gate. With
--format tf1, the command writes a checkpoint that the original TF 1.x program can restore
(docs/fine_tuning.md). The rest of this text is about SavedModels.

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

The signature serving_default is score with the tokenizer words, and score_ids with other
tokenizers. The following commands try it:

  saved_model_cli run --dir exported/small --tag_set serve --signature_def serving_default \\
      --input_exprs 'words=[["the", "company", "said"]]'
  tensorflow_model_server --rest_api_port=8501 --model_name=small --model_base_path=/models/small
  curl -d '{"instances": [{"words": ["the", "company", "said"]}]}' \\
      http://localhost:8501/v1/models/small:predict

TensorFlow Serving must not be older than the TensorFlow that exported the model. It expects a
directory for each version: export to /models/small/1. Unless --rows is given, the server may
combine requests into batches (--enable_batching) if all texts have the same T. Pad shorter texts
with "" or -1. Padding inside a text is an error. The server's option pad_variable_length_inputs
would repeat words instead.

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
"""

import dataclasses

from lm.cli import program
from lm.cli.parser import RunChoice, parse
from lm.options import Checked, option
from lm.tensorflow_import import import_tensorflow


@dataclasses.dataclass(frozen=True)
class ExportOptions(Checked):
    """The flags of this command."""

    to: str = option(
        "", "new directory for the export, or new file for npz and safetensors", required=True,
        is_path=True,
    )  # fmt: skip
    format: str = option(
        "saved_model", "saved_model; tf1: a checkpoint for the original TF 1.x program;"
        " npz or safetensors: a file with the weights",
        choices=("saved_model", "tf1", "npz", "safetensors"),
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
    from lm.inference.weights import export_weights

    run = open_run(**run)
    if options.format == "saved_model":
        saved_model.export(run, options.to, options.rows)
    elif options.format == "tf1":
        tf1_checkpoint.export(run, options.to)
    else:
        export_weights(run, options.to, options.format)


def main() -> None:
    program.run_alone(_export)


if __name__ == "__main__":
    main()
