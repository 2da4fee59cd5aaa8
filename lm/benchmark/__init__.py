"""Measurements of training steps: speed, comparison with other programs, and scaling.

Each command (`step`, `scaling`, `advise`) is a module with a function `measure`. Every measurement
runs in a new process (`worker`), and the measurements of a command take turns (`turns`), so that a
slow minute of the machine affects all measurements equally.

A `peer_NAME` module trains the same model with a different program. Its function
`build_step(config, vocab_size, variant, threads)` returns a `workload.Step` that starts with the
weights of `workload.initial_weights`. `step.PEERS` lists its variants.
"""
