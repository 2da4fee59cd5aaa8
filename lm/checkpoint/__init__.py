"""Checkpoints: how a run survives a fault, and how its weights are used later.

`store` writes, verifies, finds and prunes the checkpoints of a run. `run_dir` opens the directory
of a run and finds the checkpoint to resume from. `variables` copies arrays from a session and back.
"""
