"""Reports: the tables, figures and pages of `python -m lm.report`, from the files of runs.

A notebook can call `comparison.read_run` to read a run directory, and `comparison.group_by_corpus`
to group comparable runs. `tables`, `curves` and `page` present them as text, figures and HTML.
"""
