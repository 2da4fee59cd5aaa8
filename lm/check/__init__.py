"""A check of a machine or a cluster before the first training: `python -m lm.check`.

`__main__` starts the ranks, and `ranks` lists the checks that they run together. Each result is a
line of a `Checklist`.
"""
