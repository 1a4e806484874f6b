# SPDX-License-Identifier: Apache-2.0
"""`anyaccel generate` with the real SmolLM2, as a user calls it, and what sharding does to its numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import anyaccel
import ranks
from anyaccel import comm
from anyaccel.inference import generate_tokens
from anyaccel.inference.text.tokenizer import load_tokenizer
from rank_processes import ranks_below
from waiting import wait_for

COMMAND = (sys.executable, "-m", "anyaccel", "generate")
# The likeliest tokens of this answer are far ahead of the next: rounding changes none. (The model means Neptune.)
CLEAR = ("Name the largest planet.", "The largest planet in our solar system is")
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of a paper clip.",
    "Explain why the sky is blue.",
    "def fibonacci(n):",
)


@pytest.fixture(scope="module", autouse=True)
def _server(rank_server: None) -> None:
    """Needed by the tests that start ranks."""


def generate(*arguments: str, timeout: float = 110, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **env},
    )


def answer(*arguments: str, **env: str) -> dict[str, object]:
    done = generate(*arguments, "--json", **env)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def greedy_tokens(folder: str, dtype: str) -> list[list[int]]:
    """The first 16 greedy tokens for each of three prompts."""
    engine = anyaccel.init_inference(folder, dtype=dtype, threads=1, tensor_parallel={"tp_size": comm.get_world_size()})
    tokenizer = load_tokenizer(Path(folder))
    engine.module.generation_config.eos_token_id = None
    return [
        list(generate_tokens(engine, torch.tensor(tokenizer(prompt)["input_ids"]), max_new_tokens=16))
        for prompt in PROMPTS[:3]
    ]


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_and_of_transformers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    (alone,) = ranks.run(greedy_tokens, 1, str(smollm2), "fp32")
    first, second = ranks.run(greedy_tokens, 2, str(smollm2), "fp32")
    assert first == second
    assert first == alone
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = load_tokenizer(smollm2)(PROMPTS[0], return_tensors="pt")
    reference = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert reference.tolist() == alone[0]


def prompt_logits(folder: str, dtype: str, through_bf16: bool) -> list[torch.Tensor]:
    """Logits of each prompt, [tokens, vocabulary] in fp32; `through_bf16` rounds the weights and computes in fp32."""
    engine = anyaccel.init_inference(
        folder, dtype=dtype, runtime="plain", tensor_parallel={"tp_size": comm.get_world_size()}
    )
    if through_bf16:
        with torch.no_grad():
            for parameter in engine.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
    tokenizer = load_tokenizer(Path(folder))
    with torch.inference_mode():
        return [engine(torch.tensor([tokenizer(prompt)["input_ids"]])).logits[0].float() for prompt in PROMPTS]


@pytest.mark.slow
def test_bf16_logits_of_two_ranks_differ_by_no_more_than_rounding(smollm2: Path) -> None:
    """The bound: the error against exact arithmetic on the same bf16 weights that one process has itself, and no more.

    Sharding only moves where partial sums are rounded (each half of a row-parallel product is rounded to bf16 before
    the sum). Rounding errors of the two runs are independent and of one size, so their RMS difference is about
    sqrt(2) times the RMS error of either; 2 leaves room for the two extra roundings a layer.
    """
    (exact,) = ranks.run(prompt_logits, 1, str(smollm2), "fp32", True)
    (alone,) = ranks.run(prompt_logits, 1, str(smollm2), "bf16", False)
    sharded, _ = ranks.run(prompt_logits, 2, str(smollm2), "bf16", False)

    def rms(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return float(torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).square().mean().sqrt())

    rounding = rms(alone, exact)
    assert rounding > 0
    assert rms(sharded, exact) <= 1.5 * rounding
    assert rms(sharded, alone) <= 2 * rounding


def test_command_with_two_ranks_says_what_it_does(smollm2: Path) -> None:
    done = generate(PROMPTS[0], "--tp", "2", "--model", str(smollm2), "--dtype", "fp32", "--max-new-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    order = [
        "accelerator",
        "topology: ",
        "plan: 2 workers",
        "rank 0: core",
        "rank 1: core",
        "loading",
        "prompt 37 tokens",
    ]
    places = [done.stderr.find(text) for text in order]
    assert -1 not in places, done.stderr
    assert places == sorted(places), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "tokens/s; generated 8 tokens" in last
    assert "peak memory" in last


def test_command_gives_the_same_json_for_one_and_two_ranks(smollm2: Path) -> None:
    arguments = (PROMPTS[1], "--model", str(smollm2), "--dtype", "fp32", "--max-new-tokens", "32")
    one, two = answer(*arguments, "--tp", "1"), answer(*arguments, "--tp", "2")
    assert one["tokens"] == two["tokens"]
    assert one["text"] == two["text"]
    assert (one["tp"], two["tp"]) == (1, 2)
    assert len(two["peak_memory_bytes_by_rank"]) == 2
    assert two["generated_tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_command_gives_the_same_first_tokens_for_every_prompt(prompt: str, smollm2: Path) -> None:
    arguments = (prompt, "--model", str(smollm2), "--dtype", "fp32", "--max-new-tokens", "32")
    assert answer(*arguments, "--tp", "1")["tokens"] == answer(*arguments, "--tp", "2")["tokens"]


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16", "int8", "int4"))]
)
def test_every_precision_gives_the_clear_answer(dtype: str, smollm2: Path) -> None:
    result = answer(CLEAR[0], "--model", str(smollm2), "--dtype", dtype, "--max-new-tokens", "16")
    assert str(result["text"]).startswith(CLEAR[1])
    assert result["runtime"] == "native"
    # Weights, cache and at most 200 MB: 135 million of them, and Python itself.
    weights = 135e6 * {"bf16": 2, "fp16": 2, "int8": 1.1, "int4": 0.8}[dtype]
    assert float(str(result["peak_memory_bytes"])) < 1.15 * weights + 200e6


def test_stop_text_system_prompt_and_small_cache(smollm2: Path) -> None:
    arguments = (PROMPTS[0], "--model", str(smollm2), "--max-new-tokens", "16", "--kv-cache", "int8", "--threads", "1")
    done = generate(*arguments, "--stop", " Paris", "--system", "You are a helpful assistant.", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of France is\n", "")
    result = answer(*arguments, "--stop", " Paris", "--system", "You are a helpful assistant.")
    assert result["text"] == "The capital of France is"


def test_native_path_imports_neither_torch_nor_transformers(smollm2: Path) -> None:
    script = (
        "import sys\nfrom anyaccel.cli import main\n"
        "assert main(['generate', 'hi', '--model', sys.argv[1], '--max-new-tokens', '2', '-q']) == 0\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'safetensors', 'gguf', 'tqdm'} & set(sys.modules)))"
    )
    for _ in range(2):  # packed, and from the packed cache
        done = subprocess.run([sys.executable, "-c", script, str(smollm2)], capture_output=True, text=True, timeout=110)
        assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_first_run_of_a_gguf_file_needs_no_more_than_the_next(tmp_path: Path) -> None:
    """With nothing in the cache: the tokenizer is converted and the weights are packed, in the same little memory."""
    for package in ("torch", "transformers", "numpy", "gguf"):
        (tmp_path / f"{package}.py").write_text(f"raise RuntimeError('{package} is imported')\n")
    env = {
        "PYTHONPATH": os.pathsep.join((str(tmp_path), *filter(None, (os.environ.get("PYTHONPATH"),)))),
        "ANYACCEL_CACHE_DIR": str(tmp_path / "cache"),
    }
    first = answer(CLEAR[0], "--max-new-tokens", "12", **env)
    assert str(first["text"]).startswith(CLEAR[1])
    (folder,) = (each for each in (tmp_path / "cache" / "tokenizers").iterdir() if each.is_dir())
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < {each.name for each in folder.iterdir()}
    # Weights, cache and at most 200 MB.
    assert float(str(first["peak_memory_bytes"])) < 1.05 * 135e6 * 2 + 200e6
    assert answer(CLEAR[0], "--max-new-tokens", "12", **env)["tokens"] == first["tokens"]


def test_native_ranks_import_neither_torch_nor_transformers(smollm2: Path, tmp_path: Path) -> None:
    """Where importing these fails, two ranks give the tokens of one process, in little more memory."""
    for package in ("torch", "transformers", "numpy"):
        (tmp_path / f"{package}.py").write_text(f"raise RuntimeError('{package} is imported')\n")
    arguments = (PROMPTS[0], "--model", str(smollm2), "--max-new-tokens", "8")
    path = {"PYTHONPATH": os.pathsep.join((str(tmp_path), *filter(None, (os.environ.get("PYTHONPATH"),))))}
    one, two = answer(*arguments, **path), answer(*arguments, "--tp", "2", **path)
    assert two["runtime"] == "native"
    assert two["text"] == one["text"] == "The capital of France is Paris."
    # Weights, cache and at most 200 MB in all processes together.
    assert float(str(two["peak_memory_bytes"])) < 1.05 * 135e6 * 2 + 200e6
    assert float(str(two["peak_memory_bytes"])) > sum(two["peak_memory_bytes_by_rank"])  # type: ignore[arg-type]


def test_a_parent_that_ignores_the_end_of_its_children_is_no_hindrance(smollm2: Path) -> None:
    """A shell's `trap '' CHLD` goes on to the command, whose own children would then leave no exit code."""
    command = [sys.executable, "-m", "anyaccel", "generate", PROMPTS[0], "--tp", "2", "--model", str(smollm2), "-q"]
    done = subprocess.run(
        [*command, "--max-new-tokens", "4"],
        capture_output=True,
        text=True,
        timeout=110,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "The capital of France\n"


@pytest.mark.slow
def test_two_ranks_take_torch_for_what_the_native_runtime_lacks(smollm2: Path, tmp_path: Path) -> None:
    for file in smollm2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((smollm2 / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"per_layer_config": {"0": {"hidden_size": 576}}}))
    arguments = (PROMPTS[0], "--max-new-tokens", "6", "--stop", " France", "--dtype", "fp32")
    two = answer(*arguments, "--model", str(tmp_path), "--tp", "2")
    one = answer(*arguments, "--model", str(tmp_path))
    assert (one["runtime"], two["runtime"]) == ("torch", "torch")
    assert two["text"] == one["text"]
    assert two["tokens"] == one["tokens"]


@pytest.mark.slow  # tests of the device runtime's ranks do the same without the command
def test_the_runtime_can_be_chosen(smollm2: Path) -> None:
    arguments = (*CLEAR[:1], "--model", str(smollm2), "--max-new-tokens", "16", "--dtype", "fp32")
    native = answer(*arguments, "--runtime", "native")
    assert str(native["text"]).startswith(CLEAR[1])
    device = answer(*arguments, "--runtime", "device", "--tp", "2")
    assert (device["runtime"], device["tokens"]) == ("device", native["tokens"])


@pytest.mark.slow  # three answers; the next test runs the file as well
def test_gguf_file_runs_as_it_is(smollm2: Path) -> None:
    """The default model's blocks of 4 bits, without a conversion, say what the converted model says."""
    options = ("--max-new-tokens", "16", "--dtype", "fp32", "--threads", "1")
    assert answer(PROMPTS[0], *options)["tokens"] == answer(PROMPTS[0], *options, "--model", str(smollm2))["tokens"]
    kept = answer(CLEAR[0], "--max-new-tokens", "16", "--dtype", "auto")
    assert str(kept["text"]).startswith(CLEAR[1])


def test_an_answer_says_why_it_ends(smollm2: Path) -> None:
    question = ("What is the capital of France? Answer in one word.", "--model", str(smollm2), "--temperature", "0")
    whole = answer(*question, "--quiet")
    assert whole["finish_reason"] == "stop"
    count = len(whole["tokens"])  # type: ignore[arg-type]
    # All of it, with the token that ends it, fits just so; a token less, and it is cut.
    assert answer(*question, "--quiet", "--max-new-tokens", str(count))["finish_reason"] == "stop"
    done = generate(*question, "--json", "--max-new-tokens", str(count - 1))
    assert json.loads(done.stdout)["finish_reason"] == "length"
    assert f"the answer ends here: --max-new-tokens {count - 1} allows no more" in done.stderr
    word = str(whole["text"])[:3]
    assert answer(*question, "--quiet", "--stop", word)["finish_reason"] == "stop"


@pytest.mark.slow
def test_default_model_is_not_converted(tmp_path: Path) -> None:
    """Its weights are packed from the file; only its tokenizer is written in another form."""
    arguments = ("--dtype", "fp32", "--max-new-tokens", "12", "--temperature", "0.9", "--top-p", "0.9")
    cache = {"ANYACCEL_CACHE_DIR": str(tmp_path)}
    arguments += ("--threads", "1", "--quiet")
    result = answer(PROMPTS[2], *arguments, "--seed", "3", **cache)
    assert 1 <= len(result["tokens"]) <= 12
    assert result["tokens"] == answer(PROMPTS[2], *arguments, "--seed", "3", **cache)["tokens"]
    assert str(result["model"]).endswith(".gguf")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "PROMPT"),
        (("",), "the prompt is empty"),
        (("hi", "--model", "/nowhere/at/all"), "--model /nowhere/at/all"),
        (("hi", "--tp", "0"), "--tp 0"),
        (("hi", "--tp", "1000"), "1000"),
        (("hi", "--dtype", "int3"), "int3"),
        (("hi", "--max-new-tokens", "0"), "--max-new-tokens 0"),
        (("hi", "--temperature", "-1"), "--temperature -1"),
        (("hi", "--temperature", "nan"), "--temperature: invalid float value: 'nan'"),
        (("hi", "--top-p", "1.5"), "--top-p 1.5"),
        (("hi", "--temprature", "1"), "--temprature"),
        (("hi", "--top-k", "-1"), "--top-k -1"),
        (("hi", "--min-p", "2"), "--min-p 2"),
        (("hi", "--repetition-penalty", "0"), "--repetition-penalty 0"),
        (("hi", "--group-size", "33"), "33"),
        (("hi", "--kv-cache", "int2"), "int2"),
        (("hi", "--runtime", "cuda"), "--runtime"),
        (("hi", "--threads", "-1"), "--threads -1"),
        (("hi", "--stop", ""), "--stop"),
        (("hi", "--system", "x", "--no-chat-template"), "--system"),
        (("hi", "--chat-template", "/nowhere"), "--chat-template /nowhere: no such file"),
        (("hi", "--chat-template", __file__, "--no-chat-template"), "--chat-template"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments: tuple[str, ...], text: str) -> None:
    done = generate(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert text in done.stderr


def test_damaged_model_is_a_clear_error_of_every_rank(smollm2: Path, tmp_path: Path) -> None:
    for file in smollm2.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (smollm2 / "model.safetensors").read_bytes()[:100_000]
    (tmp_path / "model.safetensors").write_bytes(weights)
    done = generate("hi", "--model", str(tmp_path), "--tp", "2")
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr
    assert "the file is cut off: 100000 bytes of" in done.stderr
    assert "Traceback" not in done.stderr


def test_prompt_from_standard_input_and_a_reader_that_stops(smollm2: Path) -> None:
    command = [*COMMAND, "-", "--model", str(smollm2), "--quiet"]
    with subprocess.Popen(
        [*command, "--max-new-tokens", "16"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(PROMPTS[0].encode())
        process.stdin.close()
        assert process.stdout.read(3) == b"The"
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


@pytest.mark.parametrize(
    ("victim", "number", "code"), [("rank", 9, 137), ("command", 15, 143), ("command", 9, -9)], ids=str
)
def test_a_death_ends_all_at_once_and_leaves_nothing(
    victim: str, number: int, code: int, smollm2: Path, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [*COMMAND, PROMPTS[3], "--tp", "2", "--model", str(smollm2), "--max-new-tokens", "2000", "--no-chat-template"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(1)  # it generates
        ranks_of_it = ranks_below(process.pid)
        assert len(ranks_of_it) == 2
        os.kill(ranks_of_it[1] if victim == "rank" else process.pid, number)
        assert process.wait(60) == code
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks_of_it), "the ranks do not end")
        errors = process.stderr.read()
    assert "Traceback" not in errors
    if victim == "rank":
        assert re.search(r"rank 1 \(process \d+\) was killed by SIGKILL", errors), errors
        assert "error: the ranks have ended with code 137" in errors
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_every_worker(smollm2: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, PROMPTS[3], "--tp", "2", "--model", str(smollm2), "--max-new-tokens", "2000", "--no-chat-template"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(1)  # it generates
        os.killpg(process.pid, 2)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()


def test_the_hosts_of_a_hostfile_answer(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    arguments = (PROMPTS[0], "--model", str(smollm2), "--max-new-tokens", "4")
    found = answer(*arguments, "--pp", "2", "--hostfile", str(tmp_path / "hosts"))
    assert found["tokens"] == answer(*arguments)["tokens"]
    assert (found["runtime"], found["tp"], found["pp"]) == ("native", 1, 2)
    assert len(found["peak_memory_bytes_by_rank"]) == 2  # type: ignore[arg-type]
    done = generate(*arguments, "--tp", "2", "--hostfile", str(tmp_path / "none"))
    assert done.returncode == 2 and "none" in done.stderr and "Traceback" not in done.stderr
    done = generate(*arguments, "--launcher", "pdsh")
    assert done.returncode == 2 and "--hostfile" in done.stderr
