#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An arm64 Python for qemu-aarch64, and what `anyaccel generate` imports besides: tools/arm64_python.sh FOLDER
# makes FOLDER/root of Debian's packages (qemu-aarch64 -L FOLDER/root FOLDER/root/usr/bin/python3.11) and FOLDER/site of
# wheels. Nothing is installed: apt works in a folder of its own, as an arm64 machine's would.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mkdir -p "$1" && cd "$1" && pwd)
python=3.11 # Debian 12's
own=${PYTHON:-.venv/bin/python} # whose pip gets the wheels
if [ -e "$folder/complete" ]; then exit 0; fi
mkdir -p "$folder/root" "$folder/site"
tools/arm64_root.sh "$folder/root" "python$python-minimal" "libpython$python-minimal" "libpython$python-stdlib" \
  "libpython$python-dev" libc6 libexpat1 zlib1g libffi8 libssl3 libbz2-1.0 liblzma5 libsqlite3-0 libstdc++6 libgcc-s1 \
  libuuid1 libcrypt1
# Where Debian's pyconfig.h looks for the one of its machine.
ln -sfn ../aarch64-linux-gnu "$folder/root/usr/include/python$python/aarch64-linux-gnu"

wheels=$folder/wheels
"$own" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
  --python-version "$python" -d "$wheels" numpy tokenizers jinja2 markupsafe
for wheel in "$wheels"/*.whl; do "$own" -m zipfile -e "$wheel" "$folder/site"; done
rm -rf "$wheels"
touch "$folder/complete"
