"""A training run, from its config to its test.

`run.train` is the entry point: `prepare` creates a `Job` on which all ranks agree, `step` builds
the training graph, and `loop` trains. `progress` is the position of a run, `checkpointer` saves it,
and `restore` loads it.
"""
