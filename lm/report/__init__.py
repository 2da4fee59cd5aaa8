"""Reports: the tables, figures and pages of `python -m lm.report`, from the files of runs alone.

A notebook can use the readers: `metrics.read_run` reads a run directory, and
`comparison.group_by_corpus` groups comparable runs. `tables`, `curves` and `page` present them as
text, figures and HTML. `lm/search/results.py` reports a search.
"""
