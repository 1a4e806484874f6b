#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Debian's packages of arm64, unpacked: tools/arm64_root.sh FOLDER PACKAGE...
# Nothing is installed: apt works in a folder of its own, as an arm64 machine's would. What a package depends on is not
# fetched; the name of a package of packages (linux-image-arm64) stands for the first one that it depends on.
set -euo pipefail

folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
for program in apt-get dpkg-deb; do
  command -v "$program" >/dev/null || { echo "arm64_root: the packages are Debian's, and there is no $program" >&2 && exit 1; }
done

apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$apt/packages"
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
packages=()
for package in "$@"; do
  case $package in
    linux-image-arm64) packages+=("$(apt-cache depends "$package" | sed -n 's/.*Depends: //p' | head -1)") ;;
    *) packages+=("$package") ;;
  esac
done
(cd "$apt/packages" && apt-get -qq download "${packages[@]}")
for package in "$apt"/packages/*.deb; do dpkg-deb -x "$package" "$folder"; done
