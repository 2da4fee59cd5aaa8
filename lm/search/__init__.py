"""Hyper-parameter search: `python -m lm.search`.

Optuna chooses what to try; each trial is a run of `lm.train` of its own, on one rank or more, on
cores, GPUs and hosts that no other trial has. `driver.py` is the loop; it reads the trials'
`metrics.jsonl` and speaks to them by signals alone.
"""
