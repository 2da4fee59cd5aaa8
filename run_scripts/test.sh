#!/usr/bin/env bash
# Sets up with the test tools, then runs ruff and the tests: unit, parallel (under mpirun),
# integration, faults.
#
#   run_scripts/test.sh                         everything but the tests marked soak
#   run_scripts/test.sh tests/unit -k batches   arguments go to pytest
#   run_scripts/test.sh -n 2 --dist loadscope tests/faults   two modules at a time, as without arguments
#   run_scripts/test.sh -m soak                 the long ones
#
# Environment: PTB_ARCHIVE, the PTB .tgz; without it the tests that need PTB skip and say so.
#   TMPDIR, a directory where programs may be run (/tmp).
# Cost: 11 minutes on 2 cores, both of which it uses, plus the set-up (see setup.sh) the first time.
# Result: exit status 0 if all pass.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$scripts/setup.sh" --dev
source "$scripts/env.sh"

ruff check .
ruff format --check .
# The whole suite: a module of tests on each core, since most of a test is the start of TensorFlow,
# which keeps one core busy; the long modules first, so that no core is idle at the end (by itself
# xdist begins with those of many tests). For a few tests more processes would only cost their own
# start.
(($#)) || set -- --numprocesses "$(nproc)" --maxprocesses 8 --dist loadscope \
    --no-loadscope-reorder tests/{integration,faults,parallel,unit}
python -m pytest "$@"
