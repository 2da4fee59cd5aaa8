"""Hyperparameter search: `python -m lm.search`.

Optuna chooses the values of each trial and stores the results. Each trial is a separate job of
`lm.train` with a run directory, cores and GPUs. `study.py` checks the command line and opens the
study, `driver.py` runs the trials, `trial.py` is one job, and `results.py` reports the search.
"""
