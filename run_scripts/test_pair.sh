#!/usr/bin/env bash
# Runs the tests with another pair of Python and TensorFlow, on the last commit, in a clone of its own
# that is removed when they pass. The pairs that are supported are the files of constraints/.
#
#   run_scripts/test_pair.sh python3.9 2.18.1                the oldest pair, the whole suite
#   run_scripts/test_pair.sh python3.13 2.21.0 tests/unit    more arguments go to pytest
#
# Environment: TMPDIR, where the clone goes (/tmp); PTB_ARCHIVE, as for test.sh.
# Cost: the set-up and the tests (see setup.sh and test.sh), 1.5 GB of disk.
# Result: exit status 0 if all pass.
set -euo pipefail
unset CDPATH # with it, cd may enter another directory
(($# >= 2)) || { echo "usage: run_scripts/test_pair.sh PYTHON TENSORFLOW_VERSION [pytest arguments]" >&2; exit 2; }
export PYTHON=$1 TENSORFLOW_VERSION=$2
shift 2
clone=$(mktemp -d "${TMPDIR:-/tmp}/test-pair.XXXXXX")
git clone --quiet "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." "$clone"
echo "testing $PYTHON with TensorFlow $TENSORFLOW_VERSION in $clone"
"$clone/run_scripts/test.sh" "$@"
rm -rf "$clone"
