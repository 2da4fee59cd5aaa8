#!/usr/bin/env bash
# Trains one config twice, with one process and with NP ranks, and compares the two runs: results, time per
# epoch, speedup, and whether all losses and perplexities are bitwise identical.
#
#   run_scripts/compare_baseline.sh                            config_test, 2 ranks
#   NP=4 run_scripts/compare_baseline.sh config_small          4 ranks
#   run_scripts/compare_baseline.sh config_small --batch_size 40    more arguments go to lm.train
#
# Environment: CONFIG (config_test, unless it is the first argument), NP (2, or the ranks of the scheduler's
#   job), OUTPUT_DIR (runs/baseline-<config>-<time>).
# Cost: two training runs. config_test takes a minute or two on 2 cores.
# Result: the report on the console, and report.html, learning_curves.png and .pdf in OUTPUT_DIR.
set -euo pipefail
# shellcheck source=run_scripts/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/launch.sh"
"$root/run_scripts/setup.sh"

CONFIG=${CONFIG:-config_test}
if [[ $# -gt 0 && $1 != -* ]]; then
    CONFIG=$1
    shift
fi
output_dir=${OUTPUT_DIR:-runs/baseline-$(basename "$CONFIG" .py)-$(date +%Y%m%d-%H%M%S)}
flags=(--log_every_steps 10 "$@")

LAUNCHER=none run_training "${flags[@]}" --output_dir "$output_dir/1-rank"
[[ -e $output_dir/1-rank ]] || exit 0 # there is no run after --help
run_training "${flags[@]}" --output_dir "$output_dir/ranks"
python -m lm.report "$output_dir/1-rank" "$output_dir/ranks" --html "$output_dir/report.html"
