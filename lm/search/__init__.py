"""Hyper-parameter search: `python -m lm.search`.

Optuna chooses what to try; each trial is a run of `lm.train` of its own, on one rank or more, on
slots and GPUs of its own. `driver.py` is the loop; it reads the trials'
`metrics.jsonl` and speaks to them by signals alone.
"""
