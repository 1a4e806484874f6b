# SPDX-License-Identifier: Apache-2.0
"""Asks `anyaccel serve`'s HTTP side with clients that people use: `make serve-clients`.

Each client asks a server whose answers are known, in the environments that the Makefile makes, and says what it did.
The result goes into docs/data/serve_clients.json, of which docs/serving.md has a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "data" / "serve_clients.json"
SCRIPTS = ROOT / "tests" / "clients"
FEATURES = ("answer", "stream", "tools", "structure", "embeddings")
NODE = ROOT / ".venv-clients" / "node_modules"


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        name: for people.
        package: the package that has it: of PyPI in `environment`, or of npm.
        script: what asks with it, in tests/clients, with its arguments after the address.
        environment: the folder of its Python; "": Node runs the script.
        model: whether it needs answers that grammars hold, and so a real model.
    """

    name: str
    package: str
    script: str
    environment: str = ".venv-clients"
    model: bool = False


CLIENTS = (
    Client("OpenAI, Python", "openai", "openai_client.py"),
    Client("OpenAI, JavaScript", "openai", "openai_client.mjs", ""),
    Client("Anthropic, Python", "anthropic", "anthropic_client.py"),
    Client("Anthropic, JavaScript", "@anthropic-ai/sdk", "anthropic_client.mjs", ""),
    Client("Ollama, Python", "ollama", "ollama_client.py"),
    Client("Ollama, JavaScript", "ollama", "ollama_client.mjs", ""),
    Client("LangChain", "langchain-openai", "openai_client.py langchain"),
    Client("Instructor", "instructor", "instructor_client.py", model=True),
    Client("Vercel AI SDK", "ai", "ai_sdk.mjs", ""),
    Client("promptfoo", "promptfoo", "npm_program.mjs promptfoo", ""),
    Client("Claude Code", "@anthropic-ai/claude-code", "npm_program.mjs claude", ""),
    Client("LiteLLM", "litellm", "frameworks.py litellm", ".venv-agents"),
    Client("Pydantic AI", "pydantic-ai-slim", "frameworks.py pydantic_ai", ".venv-agents"),
    Client("OpenAI Agents", "openai-agents", "frameworks.py openai_agents", ".venv-agents"),
    Client("LlamaIndex", "llama-index-llms-openai-like", "frameworks.py llama_index", ".venv-agents"),
    Client("llm", "llm", "frameworks.py llm", ".venv-agents"),
    Client("smolagents", "smolagents", "frameworks.py smolagents", ".venv-agents"),
    Client("DSPy", "dspy", "dspy_client.py", ".venv-agents", model=True),
    Client("Inspect", "inspect-ai", "frameworks.py inspect_ai", ".venv-agents"),
    Client("guidellm", "guidellm", "guidellm_client.py", ".venv-guidellm"),
    Client("lm-evaluation-harness", "lm-eval", "lm_eval_client.py", ".venv-eval"),
    Client("Open WebUI (its calls)", "", "open_webui.py"),
)


def program(client: Client) -> Path:
    """What runs its script."""
    if not client.environment:
        return NODE if NODE.is_dir() else NODE / "missing"
    return ROOT / client.environment / "bin" / "python"


def is_installed(client: Client) -> bool:
    return program(client).exists()


def version(client: Client) -> str:
    """The version of its package."""
    if not client.package:
        return ""
    if not client.environment:
        return str(json.loads((NODE / client.package / "package.json").read_text())["version"])
    code = f"from importlib.metadata import version; print(version({client.package!r}))"
    return subprocess.run([program(client), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def ask(client: Client, url: str, folder: Path) -> list[str]:
    """Let it ask; what of `FEATURES` it did.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    name, *more = client.script.split()
    runner = "node" if not client.environment else str(program(client))
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HOME": str(folder),
        "LLM_USER_PATH": str(folder / "llm"),
        "DSPY_CACHEDIR": str(folder / "dspy"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # instead of one from the network
        "NODE_FOLDER": str(NODE.parent),
    }
    command = [runner, str(SCRIPTS / name), url, *more]
    cwd = folder if client.environment else NODE.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=cwd, env=environment)
    said = next((line for line in done.stdout.splitlines() if line.startswith("did: ")), None)
    if done.returncode or said is None:
        raise RuntimeError(f"{client.name} failed: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return said.split()[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some of the clients; by default all, and the result is kept")
    options = parser.parse_args()
    known = [client.name for client in CLIENTS]
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no client {unknown[0]!r}; there are {', '.join(map(repr, known))} (quote names with blanks)")
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from serve_command import Serving
    from serve_process import serving

    results: list[dict[str, Any]] = []
    failed = 0
    with serving("--key", "sesame", "--context", "1000000", "--log-level", "warning") as server:
        for client in CLIENTS:
            if options.names and client.name not in options.names:
                continue
            found = {"client": client.name, "package": client.package}
            try:
                if not is_installed(client):
                    raise RuntimeError(f"{client.name}: there is no {client.environment or 'Node'} for it")
                real = Serving() if client.model else None
                try:
                    with tempfile.TemporaryDirectory() as folder:
                        did = ask(client, real.url if real else server.url, Path(folder))
                finally:
                    if real is not None:
                        real.end()
                results.append({**found, "version": version(client), "did": did})
                print(f"{client.name:24} {' '.join(did)}", flush=True)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(error, flush=True)
    print(f"{len(results)} clients, {failed} failed")
    if not options.names and not failed:
        RESULT.write_text(json.dumps(results, indent=1) + "\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
