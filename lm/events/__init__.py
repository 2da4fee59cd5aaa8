"""Events (numbers for programs) and log lines (sentences for people) of a run.

The rest of the program calls `reporter.Reporter`. It writes events to metrics.jsonl and to
TensorBoard (`tensorboard`), and log lines to the console and to log files (`logs`). `tracing` shows
how single steps spend their time.
"""
