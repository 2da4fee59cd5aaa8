"""Hyperparameter search: `python -m lm.search`. Each trial is a separate job of `lm.train`."""
