"""A check of a machine or a cluster before the first run: `python -m lm.check`.

`__main__` starts the ranks, and `ranks` contains the checks that all ranks run together.
"""
