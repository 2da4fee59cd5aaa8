#!/usr/bin/env bash
# Trains one config twice, with one process and with NP ranks on this host (same code, same seed),
# and compares them: results, time per epoch, speed-up, largest difference between the loss curves,
# and whether all losses and perplexities are equal, bit for bit, or which is the first that differs.
#
#   run_scripts/compare_baseline.sh                            config_test, 2 ranks
#   NP=4 run_scripts/compare_baseline.sh config_small          4 ranks
#   MAX_STEPS=300 run_scripts/compare_baseline.sh config_small --batch_size 40
#                                                              more arguments go to lm.train
#
# Environment: CONFIG      the config, if it is not the first argument (config_test)
#              NP          ranks of the second run (2)
#              MAX_STEPS   stop each run after so many steps (default: whole runs)
#              DATA_PATH   directory of the corpus (data)
#              OUTPUT_DIR  where both runs and the report go (runs/baseline-<config>-<time>)
#              LOG_EVERY_STEPS   steps between two points of the loss curves (10)
# Cost: twice the training; config_test a minute or two on 2 cores.
# Result: the report on the console, and in OUTPUT_DIR report.html, learning_curves.png and .pdf.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$scripts/setup.sh" --keep
source "$scripts/env.sh"
source run_scripts/mpirun_job.sh

config=${CONFIG:-config_test}
if [[ $# -gt 0 && $1 != -* ]]; then
    config=$1
    shift
fi
ranks=${NP:-2}
name=$(basename "$config" .py)
output_dir=${OUTPUT_DIR:-runs/baseline-$name-$(date +%Y%m%d-%H%M%S)}
train=(python -m lm.train --config "$config" --data_path "${DATA_PATH:-data}"
    --log_every_steps "${LOG_EVERY_STEPS:-10}" ${MAX_STEPS:+--max_steps "$MAX_STEPS"} "$@")

run_job "${train[@]}" --output_dir "$output_dir/1-rank"
run_job mpirun -np "$ranks" "${mpirun_options[@]}" "${train[@]}" --output_dir "$output_dir/$ranks-ranks"
python -m lm.report "$output_dir/1-rank" "$output_dir/$ranks-ranks" \
    --html "$output_dir/report.html"
