# SPDX-License-Identifier: Apache-2.0
"""The container and the manifest say the same as each other, and what the command understands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from anyaccel.cli.serve import build_parser

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[3] / "deploy"


def dockerfile(instruction: str) -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(rf"^{instruction} +(.*)$", text.rpartition("\nFROM ")[2], re.MULTILINE)


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
