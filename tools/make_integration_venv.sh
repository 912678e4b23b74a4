# Usage: sh tools/make_integration_venv.sh <python> <folder> <requirements> [pip arguments]
#
# A virtual environment with epcomm and one framework. In the requirements, besides pip's own lines:
#   # alone: <package> ...     is installed without what it requires
#   # removed: <package> ...   is uninstalled afterwards: another requirement brought it along, and it doesn't work
set -eu
python=$1 folder=$2 requirements=$3
shift 3

sh "$(dirname "$0")/make_venv.sh" "$python" "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
directive() { sed -n "s/^# $1: //p" "$requirements"; }

pip install "$@" -r "$requirements" -e . pytest pytest-timeout psutil
for package in $(directive alone); do pip install "$@" --no-deps "$package"; done
for package in $(directive removed); do pip uninstall -y "$package"; done
