"""Runs from hand-written metrics."""

import json

from lm.report.metrics import read_run

CONFIG = {"name": "small", "seed": 1, "batch_size": 20, "num_steps": 5}


def write_run(
    directory, ranks=1, speed=100.0, losses=(), test=50.0, config=CONFIG, tail="", corpus=None,
    network=None,
):  # fmt: skip
    """Write a run of one whole epoch of 10 steps, 1000 words, and of half a second one."""
    directory.mkdir()
    if corpus:
        (directory / "corpus.json").write_text(json.dumps(corpus))
    (directory / "config.json").write_text(json.dumps(config))
    epoch = {"event": "epoch", "train_perplexity": 90.0, "valid_perplexity": 80.5,
             "words_per_second": speed, "world_size": ranks}  # fmt: skip
    events = [
        {
            "event": "start",
            "world_size": ranks,
            "steps_per_epoch": 10,
            "corpus": "text",
            "vocab_size": 1000,
            "config_file": network and {"path": "mine.py", "sha256": network * 64},
        },
        *({"event": "step", "step": step, "loss": loss} for step, loss in losses),
        {**epoch, "epoch": 1, "epoch_seconds": 1000 / speed},
        {**epoch, "epoch": 2, "epoch_seconds": 500 / speed},
    ]
    if test:
        events.append({"event": "test", "test_perplexity": test})
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n" + tail)
    return read_run(str(directory))
