# shellcheck shell=bash disable=SC2034
# Source this file to set root, the project's directory, and venv, the virtual environment. Scripts stay in the
# user's directory, so relative paths are the user's.
[[ $OSTYPE == linux* ]] || {
    echo "this project needs Linux: on macOS, build an image with the Dockerfile; on Windows, use WSL 2" >&2
    exit 2
}
unset CDPATH # otherwise cd may enter a different directory
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
venv=$(realpath -ms -- "$venv") # the scripts in the environment contain this path
