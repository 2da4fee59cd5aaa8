"""Measurements of training steps: `python -m lm.benchmark`.

Every measurement runs in a new process (`worker`), and the measurements of a command take turns
(`turns`). A `peer_NAME` module trains the same model with a different program.
"""
