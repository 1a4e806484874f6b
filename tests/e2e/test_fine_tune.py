# SPDX-License-Identifier: Apache-2.0
"""docs/fine-tune.md: its commands, with a model that is small enough, on a few steps; and the script's parts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from anyaccel.topology import read_machine

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "finetune_lora.py"
PAGE = (ROOT / "docs" / "fine-tune.md").read_text()
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)

pytest.importorskip("peft")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tune") / "model"
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=264, bos_token_id=0, eos_token_id=1, pad_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(folder: Path, command: str) -> str:
    words = shlex.split(command)
    program = [sys.executable, "-m", "anyaccel"] if words[0] == "anyaccel" else [sys.executable]
    done = subprocess.run(
        [*program, *words[1:]], cwd=folder, env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True,
        text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands() -> list[str]:
    shown = PAGE.partition("## Five commands")[2].partition("```console\n")[2].partition("```")[0]
    return [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]


def talks(folder: Path) -> None:
    (code,) = re.findall(r"<!-- file: talks.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    (folder / "talks.py").write_text(code)
    run(folder, "python talks.py")


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(len(read_machine().cores()) < 2, reason="needs two allowed physical cores")
def test_the_commands_of_the_page(model: Path, tmp_path: Path) -> None:
    talks(tmp_path)
    training, trying, quantising, trying_again, serving = commands()
    said = run(tmp_path, f"{training} --model {model} --lr 1e-2".replace("finetune_lora.py", str(SCRIPT)))
    found = losses(said)
    assert len(found) == 12
    assert found[-1] < found[0] - 0.2  # an adapter on random weights learns little
    assert re.search(r"step 30 of 60: loss .* s a step, \d+ tokens/s, \d+ s left", said)
    run(tmp_path, f"{trying} --max-new-tokens 4")
    run(tmp_path, quantising)
    run(tmp_path, f"{trying_again} --max-new-tokens 4")
    assert run(tmp_path, f"{serving} --help")  # that these options are there; tests/e2e/test_serve.py serves


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_trl(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    talks(tmp_path)
    said = run(tmp_path, f"python {SCRIPT} talks.jsonl --model {model} --out tuned --steps 40 --lr 1e-2 --trl")
    found = losses(said)
    assert found[-1] < found[0] - 0.2  # an adapter on random weights learns little


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune_lora", SCRIPT)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_only_what_the_assistant_says_is_learned(model: Path, script: ModuleType) -> None:
    tokenizer, _ = script.load(model, 64)
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    tokens, labels = script.tokens_and_labels(tokenizer, messages)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(tokens) == whole
    learned = [token for token, label in zip(tokens, labels, strict=True) if label != script.IGNORED]
    assert tokenizer.decode(learned) == "cd</s>f</s>"
    assert all(label in (token, script.IGNORED) for token, label in zip(tokens, labels, strict=True))


@pytest.mark.parametrize("length", [64, 1024])  # whose attention is another one
def test_packed_conversations_do_not_see_each_other(model: Path, script: ModuleType, length: int) -> None:
    tokenizer, network = script.load(model, length)
    network.float()
    texts = ["the first one", "another", "a third that is longer than the others"]
    pairs = [(tokenizer(text)["input_ids"], tokenizer(text)["input_ids"]) for text in texts]
    rows: list[dict[str, Any]] = list(script.pack(pairs, 64))
    assert len(rows) == 1
    (row,) = rows
    assert all(len(row[name]) == 64 for name in ("input_ids", "labels", "position_ids"))
    logits = network(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0]
    begin = 0
    for tokens, _ in sorted(pairs, key=lambda pair: -len(pair[0])):
        alone = network(input_ids=torch.tensor([tokens])).logits[0]
        assert row["input_ids"][begin : begin + len(tokens)].tolist() == tokens
        torch.testing.assert_close(logits[begin : begin + len(tokens)], alone, rtol=1e-4, atol=1e-4)
        begin += len(tokens)
    assert (row["labels"][begin:] == script.IGNORED).all()
    # What is longer than a row is cut off, and what does not fit begins another.
    assert [len(row["input_ids"]) for row in script.pack([([5] * 9, [5] * 9), ([6] * 3, [6] * 3)], 8)] == [8, 8]


def test_the_loss_of_what_is_learned_is_that_of_all_logits(model: Path, script: ModuleType) -> None:
    _, network = script.load(model, 64)
    network.float()
    ids = torch.randint(0, 200, (3, 40), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(ids % 3 > 0, script.IGNORED)
    labels[:, :10] = script.IGNORED
    batch = script.collate([{"input_ids": row, "labels": of} for row, of in zip(ids, labels, strict=True)])
    wanted = network(input_ids=ids, labels=labels).loss
    outputs = network(input_ids=batch["input_ids"], logits_to_keep=batch["logits_to_keep"])
    assert outputs.logits.shape[1] < 40
    torch.testing.assert_close(script.loss_of(outputs, labels), wanted)
    count = int((labels[:, 1:] != script.IGNORED).sum())
    torch.testing.assert_close(script.loss_of(outputs, labels, 2 * count), wanted / 2)
    # Rows of which nothing is learned.
    nothing = script.collate([{"input_ids": ids[0], "labels": torch.full((40,), script.IGNORED)}])
    outputs = network(input_ids=nothing["input_ids"], logits_to_keep=nothing["logits_to_keep"])
    assert script.loss_of(outputs, nothing["labels"]) == 0


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "no messages"}',
        b"not json",
        b"[1]",
        b"\xff\xfe",
        b'{"messages": "a"}',
        b'{"messages": ["a"]}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
    ],
)
def test_a_line_that_is_no_conversation_is_named(line: bytes, script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    file.write_bytes(good.encode() + b"\n" + line + b"\n")
    with pytest.raises(SystemExit, match=r"talks\.jsonl, line 2: not an object"):
        script.read_conversations(file)


def test_a_file_that_is_not_there(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none\.jsonl: No such file or directory; give a file of conversations"):
        script.read_conversations(tmp_path / "none.jsonl")


def mistake(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: object) -> str:
    """What the script says before it trains."""
    monkeypatch.setattr(sys, "argv", ["finetune_lora.py", *map(str, options)])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    return str(stopped.value)


def test_mistakes_are_told_before_the_model_is_loaded(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(script, "load", lambda path, _: loaded.append(path))
    monkeypatch.setattr(script.anyaccel, "init_distributed", lambda: None)
    data, model = tmp_path / "talks.jsonl", tmp_path / "model"
    data.write_text('{"messages": []}')
    model.mkdir()
    (model / "config.json").touch()
    assert "there is a model already" in mistake(script, monkeypatch, data, "--out", model)
    data.write_text("bad")
    assert "line 1" in mistake(script, monkeypatch, data, "--out", tmp_path / "new")
    assert not loaded


def test_a_model_that_is_not_there(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.anyaccel, "init_distributed", lambda: None)
    data = tmp_path / "talks.jsonl"
    data.write_text('{"messages": []}')
    said = mistake(script, monkeypatch, data, "--out", tmp_path / "new", "--model", tmp_path / "none")
    assert "none: no such folder or file" in said


def test_conversations_that_teach_nothing_are_left_out(
    model: Path, script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.comm, "get_rank", lambda: 0)
    tokenizer, _ = script.load(model, 64)
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    late = [{"role": "user", "content": "a" * 64}, {"role": "assistant", "content": "b"}]
    silent: list[Any] = [[], [{"role": "user", "content": "a"}], late]
    kept = script.to_learn(tokenizer, [good, *silent], 64)
    assert kept == [script.tokens_and_labels(tokenizer, good)]
    assert "in 3 of 4 conversations the assistant says nothing within 64 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="nothing to learn"):
        script.to_learn(tokenizer, silent, 64)


def test_a_result_that_cannot_be_written_is_told_before_training(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(1000, 1000, bias=False)
    script.make_folder(tmp_path / "a" / "b", layer)
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"--out .*file: File exists"):
        script.make_folder(tmp_path / "file", layer)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    with pytest.raises(SystemExit, match="takes 2 MB, and 1 MB are free"):
        script.make_folder(tmp_path, layer)
