"""A check-up of a machine or a cluster before the first training: `python -m lm.check`.

`launcher.start_ranks` starts two ranks or those of some hosts, and `ranks.check_ranks` is what
they do together, with the exchanges in `exchange`. Each finding is a line of a `Checklist`.
"""
