"""Events (numbers for programs) and log lines (sentences for people) of a run."""
