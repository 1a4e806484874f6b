# SPDX-License-Identifier: Apache-2.0
"""The container and the manifest say the same as each other, and what the command understands."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from anyaccel.cli.serve import build_parser

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"


def stages() -> list[str]:
    """Each from its FROM on, an instruction a line."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [f"FROM {stage}" for stage in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]]


def dockerfile(instruction: str, stage: int = -1) -> list[str]:
    return re.findall(rf"^{instruction} +(.*)$", stages()[stage], re.MULTILINE)


def test_the_stages_copy_what_is_there() -> None:
    build, _ = stages()
    (source,), (base,) = dockerfile("FROM", 0), dockerfile("FROM")
    assert source == f"{base} AS build"
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=3.")
    (version,) = re.findall(r"^python:3\.(\d+)-slim-\w+$", base)
    assert int(version) >= int(least)
    assert dockerfile("COPY", 0) == [". ."]
    ignored = (ROOT / ".dockerignore").read_text().split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = ["pyproject.toml", "CMakeLists.txt", "csrc", "src", "constraints.txt", project["readme"]]
    for name in [*needed, *project["license-files"]]:
        assert (ROOT / name).exists() and not any(fnmatch(name, pattern) for pattern in ignored), name
    built, own = dockerfile("COPY")
    assert built.split() == ["--from=build", "/wheels", "/wheels"] and "--wheel-dir /wheels" in build
    assert own.split() == ["constraints.txt", "/wheels/"]
    (install,) = dockerfile("RUN")
    (extra,) = re.findall(r"\.whl\)\[(\w+)\]", install)
    assert extra in project["optional-dependencies"] and "-c /wheels/constraints.txt" in install
    for name in dockerfile("VOLUME"):
        assert f"chown {dockerfile('USER')[0]} {name}" in install


def test_docker_waits_as_long_as_the_server_drains() -> None:
    """Docker kills ten seconds after SIGTERM where nobody says more."""
    drain = build_parser().parse_args([]).drain_seconds
    for file in (DEPLOY / "Dockerfile", ROOT / "docs" / "serving.md"):
        (line,) = (each for each in file.read_text().splitlines() if "docker run --rm" in each)
        (seconds,) = re.findall(r"--stop-timeout (\d+)", line)
        assert int(seconds) > drain


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return deployment, service


def test_the_command_understands_what_both_say() -> None:
    (entry,) = map(json.loads, dockerfile("ENTRYPOINT"))
    assert entry[:2] == ["anyaccel", "serve"]
    (container,) = manifest()[0]["spec"]["template"]["spec"]["containers"]
    options = build_parser().parse_args(entry[2:] + container["args"])
    assert (options.host, options.json_logs, options.model) == ("0.0.0.0", True, "/model")
    assert [str(options.port)] == dockerfile("EXPOSE")
    assert f":{options.port}/health" in dockerfile("HEALTHCHECK")[0]
    (port,) = container["ports"]
    assert port["containerPort"] == options.port
    pod = manifest()[0]["spec"]["template"]["spec"]
    (pause,) = [int(word) for word in container["lifecycle"]["preStop"]["exec"]["command"] if word.isdigit()]
    assert pod["terminationGracePeriodSeconds"] > options.drain_seconds + pause


def test_user_folders_and_labels_are_the_same() -> None:
    deployment, service = manifest()
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [str(pod["securityContext"]["runAsUser"])] == dockerfile("USER")
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {"/model", "/tmp", *dockerfile("VOLUME")} == set(mounts)
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts.values())
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
