"""Reports of runs, searches and benchmarks, from their files: `python -m lm.report`."""
