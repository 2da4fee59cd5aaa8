"""Runs side by side: what `python -m lm.report` prints, draws and writes, from files alone.

`metrics.read_run` reads a run's directory; `comparison.group_by_corpus` puts runs together that
can be compared. These two are what a notebook calls; `tables`, `curves` and `page` show the result
as text, as figures and as HTML. `search` and `search_page` do the same for a search.
"""
