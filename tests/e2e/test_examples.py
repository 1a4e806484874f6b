# SPDX-License-Identifier: Apache-2.0
"""The examples, by the commands of examples/README.md. extension/ and porting/ have tests of their own."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from anyaccel.topology import read_machine

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text()
COMMANDS = [line for line in README.partition("```\n")[2].partition("```")[0].splitlines() if line]
two_cores = pytest.mark.skipif(len(read_machine().cores()) < 2, reason="needs two allowed physical cores")


def run(command, cwd=ROOT):
    """A command of the page, with this Python and this anyaccel."""
    words = shlex.split(command)
    program = [sys.executable, "-m", "anyaccel"] if words[0] == "anyaccel" else [sys.executable]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*program, *words[1:]], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(said):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]


def the_command(*parts):
    (found,) = [command for command in COMMANDS if all(part in command for part in parts)]
    return found


def test_the_page_has_every_example_and_each_says_the_same_command():
    names = {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
    assert names == set(re.findall(r"^\| \[([\w.]+)\]", README, re.MULTILINE))
    for path in EXAMPLES.glob("*.py"):
        own = [
            line.strip() for line in path.read_text().split('"""')[1].splitlines() if f"examples/{path.name}" in line
        ]
        assert own
        for command in own:
            assert command.replace("my.txt", "README.md") in COMMANDS


@two_cores
@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_training_in_a_job_of_two(how):
    found = losses(run(the_command("train_gpt", how)))
    assert len(found) == 3
    assert found[0] > 5  # of 256 bytes, by chance: log(256) is 5.5
    assert found[-1] < 3.6


@pytest.mark.slow  # the same script in a job of two is enough for each change
def test_training_in_one_process():
    found = losses(run(the_command("train_gpt", "--text")))
    assert found[-1] < 3.6


@pytest.mark.slow  # imports torch and transformers for one message
def test_training_without_text_says_what_to_give(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_gpt.py"), "--text", str(tmp_path / "short.txt")],
        capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}, timeout=250,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("has 5 bytes of text; give a file of more with --text")


@pytest.mark.slow
def test_offload():
    found = losses(run(the_command("offload_adam")))
    assert found[-1] < found[0] / 4


def small_model(folder):
    """A Llama of random weights with a tokenizer of letters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {chr(code): code for code in range(32, 127)}
    letters |= {"<unk>": 0}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
def test_generation_is_the_same_natively_and_in_torchs_operators(tmp_path):
    pytest.importorskip("transformers")
    small_model(tmp_path)
    script = [sys.executable, str(EXAMPLES / "generate_anywhere.py"), str(tmp_path), "--tokens", "8", "--dtype", "fp32"]
    outputs = []
    for more in ([], ["--runtime", "device"]):
        done = subprocess.run([*script, *more], capture_output=True, text=True, timeout=120, check=True)
        outputs.append(done.stdout.splitlines())
    assert [lines[0] for lines in outputs] == ["runtime: native on cpu", "runtime: device on cpu"]
    assert outputs[0][1:] == outputs[1][1:]


@two_cores
@pytest.mark.slow
def test_tensor_parallel_generation_gives_what_one_process_gives(tmp_path):
    pytest.importorskip("transformers")
    small_model(tmp_path)
    command = f"{the_command('generate_tp').replace('MODEL', str(tmp_path))} --tokens 8 --dtype fp32"
    together = run(command)

    from transformers import AutoTokenizer

    import anyaccel

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    tokens = anyaccel.init_inference(tmp_path, dtype="fp32").generate(ids, max_new_tokens=8, do_sample=False)
    assert together == tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n"
    assert together.startswith("Once upon a time")
