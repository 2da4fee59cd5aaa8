"""A check of a machine or a cluster before the first run: `python -m lm.check`."""
