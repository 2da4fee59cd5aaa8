#!/usr/bin/env bash
# Shows that results do not depend on ranks, threads, the instruction set or a kill: trains a tiny model on the
# synthetic corpus in several ways, and compares the checksums of the checkpoints.
#
#   run_scripts/prove.sh
#
# Environment: OUTPUT_DIR (runs/prove-<time>).
# Cost: about 100 s of CPU time, plus the setup (see setup.sh) the first time.
# Result: a table, and exit code 0 if all checkpoints are identical. The runs are in OUTPUT_DIR.
set -euo pipefail
# shellcheck source=run_scripts/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/launch.sh"
(($# == 0)) || fail "this script takes no arguments; compare_baseline.sh compares runs of your config"
"$root/run_scripts/setup.sh"

row='%-12s %5s %7s  %-12s  %.32s\n'
output_dir=${OUTPUT_DIR:-runs/prove-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$output_dir"
export CUDA_VISIBLE_DEVICES='' # runs on GPUs are not exact
LAUNCHER=mpirun CONFIG=config_test
load_settings
common=(--data_path "$output_dir/data" --noeval --checkpoint_every_steps 100)

run() { # NAME RANKS THREADS FLAG...
    local name=$1 threads=$3
    NP=$2
    shift 3
    run_training "${common[@]}" --output_dir "$output_dir/$name" --intra_op_threads "$threads" "$@" \
        >"$output_dir/$name.txt" 2>&1
}

different=0 expected=''
prove() { # NAME RANKS THREADS FLAG...
    local sum instructions
    run "$@" --max_steps 300 || { cat "$output_dir/$1.txt" >&2; exit 1; }
    ! grep -q '^ *exact *no' "$output_dir/$1.txt" ||
        fail "$1 is not exact, so it is not compared; see $output_dir/$1.txt"
    sum=$(cat "$output_dir/$1/checkpoints/step-00000300/model.data-"* | sha256sum)
    instructions=$(sed -n 's/.*compiled ops for \(\w*\).*/\1/p' "$output_dir/$1.txt")
    # shellcheck disable=SC2059  # row is a format
    printf "$row" "$1" "$2" "$3" "${instructions:-plain}" "$sum"
    [[ $sum == "${expected:=$sum}" ]] || different=1
}

# shellcheck disable=SC2059
printf "$row" run ranks threads instructions 'SHA-256 of the checkpoint'
prove reference 1 1
prove threads 1 3
prove two-ranks 2 1
prove four-ranks 4 1
prove eight-ranks 8 1
LM_KERNELS_ISA=avx2 prove instructions 2 1

# The command of --on_event is a child of rank 0. It kills rank 0 at the first checkpoint.
export CHECKPOINT="$output_dir/killed/checkpoints/step-00000100"
# shellcheck disable=SC2016  # the command expands its variables
kill='while kill -0 $PPID; do sleep 0.1; [ ! -e "$CHECKPOINT" ] || kill -9 $PPID; done'
if run killed 2 1 --on_event "$kill" || [[ ! -e $CHECKPOINT ]]; then
    fail "rank 0 was not killed after its first checkpoint; see $output_dir/killed.txt"
fi
prove killed 4 1 --resume

((different == 0)) || { echo "different: a checkpoint does not equal the reference"; exit 1; }
echo identical
