# SPDX-License-Identifier: Apache-2.0
"""Which extra of this package brings which other package, for messages about one that is missing.

The wheel alone depends on nothing: launcher, topology and report work without torch. pyproject.toml has the versions.
"""

from __future__ import annotations

EXTRA_OF = {
    "torch": "torch",
    "numpy": "torch",
    "accelerate": "llm",
    "gguf": "native",
    "jinja2": "native",
    "safetensors": "llm",
    "tokenizers": "native",
    "transformers": "llm",
    "libcst": "port",
    "shtab": "completion",
    "httptools": "serve",
    "llguidance": "serve",
    "pydantic": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "uvloop": "serve",
    "ray": "ray",
    "opentelemetry-sdk": "otel",
}


def pip_line(package: str) -> str:
    """The command that brings a package that is missing."""
    extra = EXTRA_OF.get(package)
    return f"pip install 'anyaccel[{extra}]'" if extra else f"pip install {package}"
