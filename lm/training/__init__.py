"""A run from its first step to its test.

`run.train` is what others call: it prepares what the ranks must agree on, builds the step and
hands both to the `loop`. What the loop does now and then has a module for each thing: `saving`,
`validation`; `position` is how far the run is, which checkpoints carry and `restore` brings back.
"""
