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
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
  echo "arm64_python: the packages are Debian's, and this machine has no apt-get" >&2
  exit 1
fi

apt=$folder/apt
mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$apt/packages" "$folder/root" "$folder/site"
touch "$apt/state/status"
cat >"$apt/conf" <<CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "root";
Dir::State "$apt/state";
Dir::State::status "$apt/state/status";
Dir::Cache "$apt/cache";
CONF
export APT_CONFIG=$apt/conf
apt-get -qq update
(cd "$apt/packages" && apt-get -qq download "python$python-minimal" "libpython$python-minimal" \
  "libpython$python-stdlib" "libpython$python-dev" libc6 libexpat1 zlib1g libffi8 libssl3 libbz2-1.0 liblzma5 \
  libsqlite3-0 libstdc++6 libgcc-s1 libuuid1 libcrypt1)
for package in "$apt"/packages/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
rm -rf "$apt"
# Where Debian's pyconfig.h looks for the one of its machine.
ln -sfn ../aarch64-linux-gnu "$folder/root/usr/include/python$python/aarch64-linux-gnu"

wheels=$folder/wheels
"$own" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
  --python-version "$python" -d "$wheels" numpy tokenizers jinja2 markupsafe
for wheel in "$wheels"/*.whl; do "$own" -m zipfile -e "$wheel" "$folder/site"; done
rm -rf "$wheels"
touch "$folder/complete"
