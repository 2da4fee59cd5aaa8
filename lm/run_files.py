"""The names of the files in the directory (`--output_dir`) of a run, and in that of a search."""

import os

RUN = "run.json"  # the RunRecord, and whether there has been a checkpoint
VOCABULARY = "vocabulary.txt"  # a word's id is its line, from 0
METRICS = "metrics.jsonl"  # the events, one per line
LOG = "log.txt"  # rank 0's; those of other ranks are named after it
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"  # held by the job that writes here

# Of a search: one directory for each trial's run, by the trial's number, and beside them
SEARCH = "search.json"  # what is searched, and how
SEARCH_CONFIG = "config.py"  # a copy of the config file that it began with
STUDY = "study.db"  # the trials, in SQLite
BEST = "best.py"  # a config file: that of the best trial
TRIALS = "trials"
CONSOLE = "console.txt"  # in a trial's run: what its jobs printed


def trial_dir(search_dir: str, number: int) -> str:
    """Return the directory of a trial's run."""
    return os.path.join(search_dir, TRIALS, f"{number:04d}")
