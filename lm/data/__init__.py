"""From texts to windows of word ids, without TensorFlow: the same on every rank.

`run_corpus.load_run_corpus` gives the corpus that a config names: PTB (`ptb`, by `download` and
`archive`), the user's own text, or the `embedded` one; `encoding` turns it into ids of a
`vocabulary`, once per host, which `cache` keeps. `batches` cuts the ids into the windows of a
rank.
"""
