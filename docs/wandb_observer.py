"""Sends a run to W&B: python -m lm.train ... --on_event "python docs/wandb_observer.py"."""

import json
import sys

import wandb

for event in map(json.loads, sys.stdin):
    if event["event"] == "start":
        with open(f"{event['output_dir']}/run.json") as file:
            record = json.load(file)
        # Offline runs are stored in wandb/, and `wandb sync` uploads them.
        config = {**record["config"], "provenance": record["provenance"]}
        wandb.init(project="lm", name=event["output_dir"], config=config, mode="offline")
    elif event["event"] == "end":
        wandb.finish(exit_code=int(event["outcome"] != "finished"))
    else:
        numbers = {name: v for name, v in event.items() if isinstance(v, (int, float))}
        wandb.log(numbers, step=event["step"])
if wandb.run:  # without an "end" event, the job was killed
    wandb.finish(exit_code=1)
