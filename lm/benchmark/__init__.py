"""Measurements of training steps: `python -m lm.benchmark`.

The measurements of a command run in new processes (`worker`) and take turns (`turns`). A
`peer_NAME` module trains the same model with a different program.
"""
