# SPDX-License-Identifier: Apache-2.0
"""`anyaccel models` with a hub of our own: what is pulled, checked, found by name, and removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuzz_models
from anyaccel.cli import main
from anyaccel.cli._model_options import model_path
from anyaccel.errors import UsageError
from anyaccel.inference.checkpoints import hub as names
from anyaccel.inference.checkpoints.hub import HubName, RemoteFile, gguf_files, variant_of, wanted_files
from fake_hub import COMMIT, Hub, hub_of

GGUF = fuzz_models.healthy_gguf("llama").content()
FOLDER = {
    "config.json": b'{"architectures": ["TinyForCausalLM"], "max_position_embeddings": 64}',
    "tokenizer.json": b"{}",
    "model.safetensors": os.urandom(24 << 20),
    "pytorch_model.bin": b"the same weights again",
    "pytorch_model.bin.index.json": b"{}",
    "onnx/model.onnx": b"and again",
    "README.md": b"# Tiny",
}
QUANTISED = {"Tiny-Q4_K_M.gguf": GGUF, "Tiny-Q8_0.gguf": GGUF + b"\0" * 64, "mmproj-Tiny-F16.gguf": b"a vision encoder"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with hub_of({"org/tiny": FOLDER, "org/tiny-GGUF": QUANTISED}) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def anyaccel(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: huggingface_hub reads its variables when it is imported."""
    command = [sys.executable, "-m", "anyaccel", "models", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_folder_is_pulled_once_and_taken_by_its_name(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="hf:org/tiny is not here: get it with `anyaccel models pull hf:org/tiny`"):
        model_path("hf:org/tiny")
    done = anyaccel("pull", "hf:org/tiny")
    assert done.returncode == 0, done.stderr
    path = model_path("hf:org/tiny")
    assert path.name == COMMIT
    assert {file.name for file in path.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == FOLDER["model.safetensors"]
    asked = len(hub.asked)
    assert anyaccel("pull", "hf:org/tiny", "-q").returncode == 0
    assert not [each for each in hub.asked[asked:] if each[0] == "GET" and "/resolve/" in each[1]], "downloaded again"
    assert main(["models", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["models"]
    assert (listed["name"], listed["path"], listed["complete"]) == ("hf:org/tiny", str(path), True)
    assert listed["size"] == sum(len(FOLDER[each.name]) for each in path.iterdir())
    assert main(["models", "show", "hf:org/tiny"]) == 0
    assert "TinyForCausalLM" in capsys.readouterr().out
    assert main(["generate", "--model", "hf:org/none", "x"]) == 2
    assert main(["models", "remove", "hf:org/tiny"]) == 0
    assert names.local_models() == [] and not list((path.parents[1]).glob("*"))
    assert main(["models", "remove", "hf:org/tiny"]) == 2


def test_of_gguf_files_one_is_pulled_and_each_is_removed_alone(hub: Hub) -> None:
    assert anyaccel("pull", "hf:org/tiny-GGUF:q8_0", "-q").returncode == 0
    done = anyaccel("pull", "hf:org/tiny-GGUF", "--json")
    assert json.loads(done.stdout)["name"] == "hf:org/tiny-GGUF:Q4_K_M", done.stderr
    found = names.local_models()
    assert [(str(each.name), each.path.name) for each in found] == [
        ("hf:org/tiny-GGUF:Q4_K_M", "Tiny-Q4_K_M.gguf"),
        ("hf:org/tiny-GGUF:Q8_0", "Tiny-Q8_0.gguf"),
    ]
    assert model_path("hf:org/tiny-GGUF:Q8_0").read_bytes() == QUANTISED["Tiny-Q8_0.gguf"]
    assert names.remove("hf:org/tiny-GGUF:Q8_0") == len(QUANTISED["Tiny-Q8_0.gguf"])
    assert [str(each.name) for each in names.local_models()] == ["hf:org/tiny-GGUF:Q4_K_M"]
    with pytest.raises(UsageError, match="here is hf:org/tiny-GGUF:Q4_K_M"):
        model_path("hf:org/tiny-GGUF:Q8_0")
    shown = anyaccel("show", "hf:org/tiny-GGUF", "--json")
    assert json.loads(shown.stdout)["architecture"] == "llama"
    wrong = anyaccel("pull", "hf:org/tiny-GGUF:Q2_K")
    assert wrong.returncode == 2
    assert "There is hf:org/tiny-GGUF:Q4_K_M, hf:org/tiny-GGUF:Q8_0" in wrong.stderr and "mmproj" not in wrong.stderr


@pytest.mark.slow
def test_a_download_that_was_cut_goes_on_where_it_ended(hub: Hub) -> None:
    hub.cut["model.safetensors"] = 16 << 20
    done = anyaccel("pull", "hf:org/tiny", "-q")
    if done.returncode != 0:  # a library that does not try again by itself
        assert "what has been downloaded is kept" in done.stderr
        done = anyaccel("pull", "hf:org/tiny", "-q")
    assert done.returncode == 0, done.stderr
    assert any(each[2].startswith("bytes=") and each[2] != "bytes=0-" for each in hub.asked), hub.asked
    assert (model_path("hf:org/tiny") / "model.safetensors").read_bytes() == FOLDER["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_downloaded_again_and_never_kept(hub: Hub, name: str) -> None:
    hub.damaged[name] = 1
    done = anyaccel("pull", "hf:org/tiny", "-q")
    assert done.returncode == 0, done.stderr
    assert (model_path("hf:org/tiny") / name).read_bytes() == FOLDER[name]
    names.remove("hf:org/tiny")
    hub.damaged[name] = 100
    done = anyaccel("pull", "hf:org/tiny", "-q")
    assert done.returncode == 1 and f"{name} is not what the hub says it is" in done.stderr
    assert done.stderr.count("\n") == 1


def test_why_a_model_cannot_be_pulled_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in {
        "hf:org/none": "hf:org/none: no such repository, or a private one",
        "org/tiny": "org/tiny: must be hf:ORGANISATION/NAME",
        "hf:../x": "must be hf:ORGANISATION/NAME",
    }.items():
        done = anyaccel("pull", name)
        assert done.returncode in (1, 2) and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in anyaccel("pull", "hf:org/tiny").stderr
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = anyaccel("pull", "hf:org/tiny")
    assert done.returncode == 1 and "http://127.0.0.1:9 does not answer" in done.stderr and done.stderr.count("\n") == 1


def test_an_incomplete_model_is_said_to_be(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert anyaccel("pull", "hf:org/tiny", "-q").returncode == 0
    path = model_path("hf:org/tiny")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    with pytest.raises(UsageError, match="is here in parts only"):
        model_path("hf:org/tiny")
    assert main(["models", "list"]) == 0
    assert "in parts" in capsys.readouterr().out


def test_an_empty_cache_says_how_to_fill_it(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "anyaccel models pull" in capsys.readouterr().out
    assert main(["models", "pull"]) == 2
    assert main(["models", "list", "hf:a/b"]) == 2


def test_names_and_variants() -> None:
    assert HubName.parse("hf:a/b.c-d:Q4_K_M") == HubName("a/b.c-d", "Q4_K_M")
    files = ["x-IQ4_XS.gguf", "X.Q8_0.gguf", "x-f16.gguf", "sub/x-BF16-00001-of-00002.gguf", "other.gguf"]
    assert [variant_of(file) for file in files] == ["IQ4_XS", "Q8_0", "f16", "BF16", "other"]
    parts = ["a-Q8_0-00002-of-00002.gguf", "a-Q8_0-00001-of-00002.gguf", "mmproj-a.gguf"]
    assert gguf_files(parts) == {"a-Q8_0-00001-of-00002.gguf": sorted(parts[:2])}
    only_bin = [RemoteFile(name, 1) for name in ("config.json", "pytorch_model.bin", "training_args.bin")]
    assert [file.name for file in wanted_files(HubName("a/b"), only_bin)] == ["config.json", "pytorch_model.bin"]
    with pytest.raises(UsageError, match="no weights that can be read here"):
        wanted_files(HubName("a/b"), [RemoteFile("README.md", 1)])
