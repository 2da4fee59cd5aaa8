# shellcheck shell=bash
# Sourced by the run scripts: enters the project's root, where all of them work. Relative paths in their
# variables go on to mean the directory that the user is in; those in arguments mean the root.
unset CDPATH # with it, cd may enter, and what follows delete .venv of, another directory

from_here() { # NAME of a variable
    [[ -z ${!1:-} || ${!1} == /* ]] || printf -v "$1" %s "$PWD/${!1}"
}
for name in OUTPUT_DIR DATA_PATH HOSTFILE PTB_ARCHIVE CUDA_HOME; do
    from_here "$name"
done
# Without a slash these are in PATH, and a config is one of configs/.
for name in DISCOVER_HOSTS PYTHON CXX CONFIG; do
    [[ ${!name:-} != */* ]] || from_here "$name"
done
[[ ${CONFIG:-} != *.py ]] || from_here CONFIG

cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
