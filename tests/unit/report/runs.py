"""Runs from hand-written metrics."""

import json

import optuna
from optuna.distributions import FloatDistribution
from optuna.trial import create_trial

from lm.json_files import write_json
from lm.record import CorpusRecord, FileRecord, RunRecord
from lm.report.metrics import read_run

CONFIG = {"name": "small", "seed": 1, "batch_size": 20, "num_steps": 5}

CORPUS = CorpusRecord("text", "/data", "0" * 64)


def write_record(directory, config=CONFIG, corpus=CORPUS, network=None):
    file = FileRecord("mine.py", network * 64) if network else None
    RunRecord(config, "vocabulary", corpus, file).write(str(directory), has_checkpoints=False)


def write_run(
    directory, ranks=1, speed=100.0, losses=(), test=50.0, config=CONFIG, tail="", corpus=None,
    network=None, metrics=(), tokenizer="words",
):  # fmt: skip
    """Write a run with one full epoch of 10 steps and 1000 tokens, and half a second epoch."""
    directory.mkdir(parents=True)
    write_record(directory, config, corpus or CORPUS, network)
    epoch = {"event": "epoch", "train_perplexity": 90.0, "valid_perplexity": 80.5,
             "tokens_per_second": speed, "world_size": ranks, **dict(metrics)}  # fmt: skip
    start = {"event": "start", "world_size": ranks, "steps_per_epoch": 10, "corpus": "text"}
    events = [
        {**start, "vocab_size": 1000, "tokenizer": tokenizer},
        *({"event": "step", "step": step, "loss": loss} for step, loss in losses),
        {**epoch, "step": 10, "epoch": 1, "epochs": 1.0, "epoch_seconds": 1000 / speed},
        {**epoch, "step": 15, "epoch": 2, "epochs": 1.5, "epoch_seconds": 500 / speed},
    ]
    if test:
        events.append({"event": "test", "step": 15, "test_perplexity": test})
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n" + tail)
    return read_run(str(directory))


def write_search(directory, values, flags=None):
    """Write a search whose finished trials have these parameters and validation perplexities."""
    directory.mkdir(parents=True)
    write_json(
        str(directory / "search.json"), {"corpus": "c" * 64, "study": "s", "flags": flags or {}}
    )
    study = optuna.create_study(storage=f"sqlite:///{directory}/study.db", study_name="s")
    for number, (parameters, perplexity) in enumerate(values):
        distributions = {name: FloatDistribution(1e-3, 10, log=True) for name in parameters}
        study.add_trial(
            create_trial(params=parameters, distributions=distributions, value=perplexity)
        )
        write_run(directory / f"trials/{number:04d}", losses=[(1, 6.0), (5, 5.0), (9, 4.0)])
