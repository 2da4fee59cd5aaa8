# shellcheck shell=bash
# Source this file to enter the project's root, where all run scripts work. Relative paths in the
# variables below keep referring to the user's directory. Paths in arguments refer to the root.
unset CDPATH # otherwise cd may enter a different directory

make_absolute() { # NAME of a variable
    [[ -z ${!1:-} || ${!1} == /* ]] || printf -v "$1" %s "$PWD/${!1}"
}
for name in OUTPUT_DIR DATA_PATH HOSTFILE PTB_ARCHIVE CUDA_HOME; do
    make_absolute "$name"
done
# Without a slash, these are found in PATH, and a config is found in configs/.
for name in DISCOVER_HOSTS PYTHON CXX CONFIG; do
    [[ ${!name:-} != */* ]] || make_absolute "$name"
done
[[ ${CONFIG:-} != *.py ]] || make_absolute CONFIG

cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
