"""Sends a run to MLflow: python -m lm.train ... --on_event "python docs/mlflow_observer.py"."""

import json
import os
import sys

import mlflow

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # Otherwise, MLflow 3 needs a database.
mlflow.set_tracking_uri("file:mlruns")
for event in map(json.loads, sys.stdin):
    if event["event"] == "start":
        with open(f"{event['output_dir']}/run.json") as file:
            record = json.load(file)
        mlflow.start_run(run_name=event["output_dir"])
        mlflow.log_params(record["config"])
        mlflow.set_tags(record["provenance"])
    elif event["event"] == "end":
        mlflow.end_run("FINISHED" if event["outcome"] == "finished" else "FAILED")
    else:
        numbers = {name: v for name, v in event.items() if isinstance(v, (int, float))}
        mlflow.log_metrics(numbers, step=event["step"])
if mlflow.active_run():  # without an "end" event, the job was killed
    mlflow.end_run("KILLED")
