"""Reports of runs, from their files: `python -m lm.report`."""
