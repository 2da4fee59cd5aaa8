"""Hyperparameter search: `python -m lm.search`.

Optuna chooses the values of each trial and runs the trials in threads. Each trial is a job of its
own: `lm.train` on one or more ranks, with its own run directory, cores and GPUs. `prepare.py`
checks the command line, `driver.py` runs the trials, `study.py` stores them, and `results.py`
reports them.
"""
