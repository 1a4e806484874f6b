# SPDX-License-Identifier: Apache-2.0
"""What other programs ask a server with: the clients of tools/serve_clients.py, schemathesis, a browser.

They are in environments of their own, which `make serve-clients` makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import serve_clients
from serve_command import Serving
from serve_process import serving

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-clients" / "bin"
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


TABLE = {each["client"]: each["did"] for each in json.loads(serve_clients.RESULT.read_text())}


@pytest.mark.parametrize("client", serve_clients.CLIENTS, ids=lambda client: client.name)
def test_clients_do_what_the_table_says(client: serve_clients.Client, tmp_path: Path) -> None:
    if not serve_clients.is_installed(client):
        pytest.skip(f"no {client.environment or 'npm'} for it: make serve-clients")
    if client.model:
        pytest.importorskip("llguidance")
        real = Serving()
        try:
            did = serve_clients.ask(client, real.url, tmp_path)
        finally:
            real.end()
    else:
        with serving("--key", "sesame", "--context", "1000000") as server:
            did = serve_clients.ask(client, server.url, tmp_path)
    assert did == TABLE[client.name]


def test_a_client_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["serve_clients.py", "llm", "OpenAI,"])
    with pytest.raises(SystemExit) as ended:
        serve_clients.main()
    assert ended.value.code == 2 and "no client 'OpenAI,'; there are 'OpenAI, Python'" in capsys.readouterr().err


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
