"""What a run tells: numbers for programs and sentences for people.

Others call `reporter.Reporter`: its events go to metrics.jsonl and, by `tensorboard`, to
TensorBoard; its lines go to the console and to the log files of the ranks, by `logs`. `tracing`
writes where the time of single steps goes.
"""
