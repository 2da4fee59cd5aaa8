#!/usr/bin/env bash
# Pins all packages that the setup installs, in one file for each supported pair of Python and TensorFlow.
#
#   run_scripts/pin.sh               after changing pyproject.toml or constraints/requirements.in
#   run_scripts/pin.sh --upgrade     the newest versions; arguments go to uv
#
# Needs: uv (pip install uv), internet. Pinned versions stay if they still fit. To support another pair, create
#   an empty file for it, run this script, then test the pair (see CONTRIBUTING.md).
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/root.sh"
cd "$root"

for file in constraints/python*-tensorflow*.txt; do
    [[ $file =~ python(.*)-tensorflow(.*).txt ]]
    python=${BASH_REMATCH[1]} tensorflow=${BASH_REMATCH[2]}
    # Horovod has no wheel, so uv runs its setup.py. This variable avoids the dependency cffi.
    HOROVOD_WITHOUT_PYTORCH=1 uv pip compile --quiet --python-version "$python" --no-annotate \
        --custom-compile-command run_scripts/pin.sh \
        --constraint <(printf '%s\n' "tensorflow==$tensorflow" "tensorflow-cpu==$tensorflow") \
        --output-file "$file" \
        --extra dev --extra search --extra report --extra tokenizers pyproject.toml constraints/requirements.in "$@"
done
