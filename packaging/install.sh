#!/bin/sh
# Install a wheel of Rookery into a virtual environment of its own: sh install.sh FOLDER WHEEL CONSTRAINTS
# The container is made with this script, too. PYTHON names the interpreter; otherwise it is python3.
set -eu
folder=$1 wheel=$2 constraints=$3
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$constraints" "$wheel[federation,privacy]"
"$folder/bin/rookery" --version
