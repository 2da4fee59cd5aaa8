#!/usr/bin/env bash
# Searches hyper-parameters: each trial is a training on RANKS ranks, PARALLEL of them at a time.
#
#   run_scripts/search.sh
#   SPACE="learning_rate=0.3:3:log, keep_prob=0.5:1.0" TRIALS=40 run_scripts/search.sh --num_epochs 3
#   OUTPUT_DIR=searches/a run_scripts/search.sh --resume        goes on with one
#
# Environment: CONFIG (config_small), SPACE (learning_rate and keep_prob; where CONFIG is a .py file
#   its suggest()), TRIALS (20), RANKS (2), PARALLEL (1), OUTPUT_DIR (searches/<config>-<time>). Of
#   these a search that is there takes OUTPUT_DIR alone: change the others by flags (--trials 60).
# Cost: TRIALS trainings, fewer with pruning; see docs/search.md.
# Result: OUTPUT_DIR/best.py and OUTPUT_DIR/report.html; the exit status of the search; 143 after
#   SIGTERM or SIGHUP, 130 after SIGINT, 140 after SIGUSR2, with everything saved. A second SIGINT
#   ends the search at once; the kernel has the running trials save and end (docs/search.md).
set -euo pipefail
case " $* " in *' --output_dir'* | *' --config'*)
    echo "search.sh: set OUTPUT_DIR and CONFIG, not --output_dir and --config" >&2
    exit 2
    ;;
esac
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$scripts/setup.sh" --keep
source "$scripts/env.sh"
source run_scripts/mpirun_job.sh

config=${CONFIG:-config_small}
output_dir=${OUTPUT_DIR:-searches/$(basename "$config" .py)-$(date +%Y%m%d-%H%M%S)}
if [[ ! -e $output_dir/search.json ]]; then
    [[ $config == *.py ]] || SPACE=${SPACE-learning_rate=0.3:3:log, keep_prob=0.5:1.0}
    set -- --config "$config" --trials "${TRIALS:-20}" --ranks_per_trial "${RANKS:-2}" \
        --parallel_trials "${PARALLEL:-1}" ${SPACE:+--space "$SPACE"} "$@"
fi
run_job python -m lm.search --output_dir "$output_dir" "$@"
python -m lm.report "$output_dir" --html "$output_dir/report.html"
