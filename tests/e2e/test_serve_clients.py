# SPDX-License-Identifier: Apache-2.0
"""What other programs ask a server with: clients of its APIs, instructor, LangChain, schemathesis, a browser.

They are in environments of their own, which `make serve-clients` makes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from serve_command import Serving
from serve_process import serving

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-clients" / "bin"
AGENTS = ROOT / ".venv-agents"
CLIENTS = ROOT / "tests" / "clients"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (BIN / "python").exists(), reason="no .venv-clients: make serve-clients"),
]


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    variables = {**os.environ, **environment}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, cwd=cwd, env=variables)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_openais_client_and_langchain() -> None:
    with serving("--key", "sesame") as server:
        run(BIN / "python", CLIENTS / "openai_client.py", server.url, "langchain")


@pytest.mark.parametrize("script", ["openai_client.mjs", "ai_sdk.mjs", "anthropic_client.mjs", "ollama_client.mjs"])
def test_clients_in_javascript(script: str) -> None:
    if not (BIN.parent / "node_modules").is_dir():
        pytest.skip("no npm when .venv-clients was made")
    with serving("--key", "sesame") as server:
        run("node", CLIENTS / script, server.url, cwd=BIN.parent)


@pytest.mark.parametrize("script", ["anthropic_client.py", "ollama_client.py"])
def test_clients_of_other_apis(script: str) -> None:
    with serving("--key", "sesame") as server:
        run(BIN / "python", CLIENTS / script, server.url)


@pytest.mark.parametrize(
    "library",
    ["litellm", "pydantic_ai", "openai_agents", "llama_index", "llm", "smolagents", "dspy", "inspect_ai"],
)
def test_libraries_for_agents(library: str, tmp_path: Path) -> None:
    if not (AGENTS / "bin" / "python").exists():
        pytest.skip("no .venv-agents: make serve-clients")
    environment = {
        "HOME": str(tmp_path),
        "LLM_USER_PATH": str(tmp_path / "llm"),
        "DSPY_CACHEDIR": str(tmp_path / "dspy"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # instead of one from the network
    }
    with serving("--key", "sesame") as server:
        said = run(
            AGENTS / "bin" / "python", CLIENTS / "frameworks.py", server.url, library, cwd=tmp_path, **environment
        )
    assert said.endswith(f"{library} answers\n")


def program(name: str) -> Path:
    """A program of npm's packages."""
    found = BIN.parent / "node_modules" / ".bin" / name
    if not found.exists():
        pytest.skip("no npm when .venv-clients was made")
    return found


def test_promptfoo(tmp_path: Path) -> None:
    off = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1", "PROMPTFOO_CONFIG_DIR": str(tmp_path)}
    command = [program("promptfoo"), "eval", "--no-cache", "--no-progress-bar", "-c", CLIENTS / "promptfoo.yaml"]
    with serving("--key", "sesame") as server:
        said = run(*command, cwd=tmp_path, SERVER_URL=server.url, **off)
    assert "1 passed" in said


def test_claude_code(tmp_path: Path) -> None:
    environment = {
        "ANTHROPIC_AUTH_TOKEN": "sesame",
        "ANTHROPIC_MODEL": "fake",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "fake",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HOME": str(tmp_path),
    }
    with serving("--key", "sesame", "--context", "1000000") as server:
        said = run(program("claude"), "-p", "hello", cwd=tmp_path, ANTHROPIC_BASE_URL=server.url, **environment)
    assert "You said: " in said and "hello" in said


def test_instructor_gets_its_objects() -> None:
    pytest.importorskip("llguidance")
    server = Serving()
    try:
        run(BIN / "python", CLIENTS / "instructor_client.py", server.url)
    finally:
        server.end()


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium: apt-get install chromium")
    less = ("--log-level", "warning")
    with serving("--pause", "0.002", *less) as server, serving("--key", "sesame", *less) as locked:
        run(BIN / "python", CLIENTS / "page.py", server.url, locked.url, tmp_path, CHROMIUM=chromium)
    assert len(list(tmp_path.glob("*.png"))) == 5


def test_schemathesis_finds_no_failure_of_the_server(tmp_path: Path) -> None:
    checks = "not_a_server_error,content_type_conformance,response_schema_conformance"
    with serving() as server:
        run(
            BIN / "schemathesis", "run", f"{server.url}/openapi.json", "--checks", checks,
            "--phases", "examples,fuzzing", "--max-examples", "20", "--seed", "7",
            "--generation-deterministic", cwd=tmp_path,
        )  # fmt: skip


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_kubernetes_takes_the_manifest(version: str, tmp_path: Path) -> None:
    """Against the schemas of Kubernetes' own API, where what they do not know is an error."""
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace("periodSeconds", "periodSecond"))
    validate = [BIN / "kubernetes-validate", "--strict", "-k", version]
    run(*validate, ROOT / "deploy" / "kubernetes.yaml")
    assert subprocess.run([*validate, tmp_path / "wrong.yaml"], capture_output=True, timeout=60).returncode != 0
