#!/usr/bin/env bash
# Searches hyperparameters. Each trial trains on RANKS ranks, and PARALLEL trials run at a time.
#
#   run_scripts/search.sh
#   SPACE="learning_rate=0.3:3:log, keep_prob=0.5:1.0" TRIALS=40 run_scripts/search.sh --num_epochs 3
#   OUTPUT_DIR=searches/a run_scripts/search.sh --resume        continues a search
#
# Environment: CONFIG (config_small), SPACE (learning_rate and keep_prob), TRIALS (20), RANKS (2), PARALLEL (1),
#   HOSTS (the scheduler's allocation, or this host; with HOSTS, trials use all slots unless PARALLEL is set),
#   OUTPUT_DIR (searches/<config>-<time>). Change an existing search with flags, such as --trials 60.
# Cost: TRIALS training runs, or less with pruning (see docs/search.md).
# Result: OUTPUT_DIR/best.py and OUTPUT_DIR/report.html. The exit code comes from lm.search.
set -euo pipefail
# shellcheck source=run_scripts/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/launch.sh"
"$root/run_scripts/setup.sh"
load_settings
run_search "$@"
