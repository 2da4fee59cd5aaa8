"""Events (numbers for programs) and log lines (sentences for people) of a run.

A `Reporter` writes events to metrics.jsonl and to TensorBoard. `logs` sends log lines to the
console and to log files.
"""
