"""Measurements of training steps: speed, comparison with other programs, and scaling.

Each command (`step`, `scaling`, `advise`) is a module with `measure` and `show`. Every measurement
runs in a new process (`worker`), and the measurements of a command take turns (`turns`), so that a
slow minute of the machine affects all of them alike.

A `peer_NAME` module is another program that trains the same model. Its function
`build_step(config, vocab_size, variant, threads)` returns a `workload.Step` that starts with the
weights of `workload.initial_weight`. A line in `step.PEERS` lists its variants.
"""
