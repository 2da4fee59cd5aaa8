#!/usr/bin/env bash
# Trains a config with one process: the single-device baseline.
#
#   run_scripts/train_single.sh
#   CONFIG=config_medium run_scripts/train_single.sh --num_epochs 1     arguments go to lm.train
#
# Environment: CONFIG (config_small).
# Cost: see docs/results.md. Result: a run in runs/; the exit status of the training.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$scripts/setup.sh" --keep
source "$scripts/env.sh"

exec python -m lm.train --config "${CONFIG:-config_small}" "$@"
