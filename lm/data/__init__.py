"""Convert text files to windows of token IDs, without TensorFlow and identically on all ranks.

`corpus` finds and loads the corpus of a run: PTB (`ptb`), the user's own text, or the generated
language (`embedded`). `encoding` converts text to IDs of a `vocabulary`, once per host. `batches`
cuts the IDs into the windows of a rank.
"""
