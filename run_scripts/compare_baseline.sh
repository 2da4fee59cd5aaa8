#!/usr/bin/env bash
# Trains one config twice, with one process and with NP ranks on this host, and compares the two runs:
# results, time per epoch, speedup, largest difference between the loss curves, and whether all losses
# and perplexities are bitwise identical.
#
#   run_scripts/compare_baseline.sh                            config_test, 2 ranks
#   NP=4 run_scripts/compare_baseline.sh config_small          4 ranks
#   MAX_STEPS=300 run_scripts/compare_baseline.sh config_small --batch_size 40
#                                                              more arguments go to lm.train
#
# Environment: CONFIG      the config, unless it is the first argument (config_test)
#              NP          ranks of the second run (2)
#              MAX_STEPS   stop each run after this many steps (default: whole runs)
#              DATA_PATH   directory of the corpus (data)
#              OUTPUT_DIR  directory of both runs and the report (runs/baseline-<config>-<time>)
#              LOG_EVERY_STEPS   steps between two points of the loss curves (10)
# Cost: twice the training; config_test takes a minute or two on 2 cores.
# Result: the report on the console, and report.html, learning_curves.png and .pdf in OUTPUT_DIR.
set -euo pipefail
# shellcheck source=run_scripts/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/launch.sh"
run_scripts/setup.sh

CONFIG=${CONFIG:-config_test}
if [[ $# -gt 0 && $1 != -* ]]; then
    CONFIG=$1
    shift
fi
name=$(basename "$CONFIG" .py)
output_dir=${OUTPUT_DIR:-runs/baseline-$name-$(date +%Y%m%d-%H%M%S)}
several=$output_dir/${NP:-2}-ranks
flags=(--data_path "${DATA_PATH:-data}" --log_every_steps "${LOG_EVERY_STEPS:-10}"
    ${MAX_STEPS:+--max_steps "$MAX_STEPS"} "$@")

LAUNCHER=none run_training "${flags[@]}" --output_dir "$output_dir/1-rank"
run_training "${flags[@]}" --output_dir "$several"
python -m lm.report "$output_dir/1-rank" "$several" --html "$output_dir/report.html"
