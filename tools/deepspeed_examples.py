#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs DeepSpeed's own examples on a CPU, on DeepSpeed as it is, on DeepSpeed with our parts and on our alias alone.

git clone https://github.com/deepspeedai/DeepSpeedExamples
python tools/deepspeed_examples.py DeepSpeedExamples --deepspeed A/bin/python --plain B/bin/python \\
    --write tests/data/deepspeed_examples.json

Both Pythons have anyaccel, torchvision, transformers, datasets and what the examples import; only the first one has
DeepSpeed. Scripts are not changed. Data and models are small stand-ins, made here and put where a script looks for
them, and nothing is downloaded. An example that demands CUDA is run once more as `anyaccel run --as-cuda`, with our
parts in DeepSpeed. The exit code is 1 when one runs on DeepSpeed as it is and not with our parts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

SIDES = {
    "deepspeed": "DeepSpeed as it is",
    "ours": "DeepSpeed with use_in_deepspeed()",
    "ours as CUDA": "the same, in the mode --as-cuda",
    "alias": "the alias, without DeepSpeed",
}


@dataclass(frozen=True)
class Example:
    """One example, and how it is run.

    Attributes:
        script: path in the checkout; it is started in its folder.
        arguments: of the script; {models} and {work} are folders.
        shows: what its output has in the end, by which one knows that it worked.
        ranks: how many workers.
        beside: folder or file that the script looks for in its folder -> what takes its place, below {models}.
        files: further files to write into its folder.
        what: a word for the table, where one script runs in several ways.
    """

    script: str
    arguments: str
    shows: str
    ranks: int = 2
    beside: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    what: str = ""

    @property
    def name(self) -> str:
        return f"{self.script} {self.what}".strip()


EXAMPLES = [Example(**each) for each in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["example"]]

# Runs a script as it is, in its own folder, below a launcher that has put `--local_rank=N` before its arguments.
STARTER = """
import runpy
import sys

rank = [word for word in sys.argv[1:2] if word.startswith("--local_rank")]
side, takes_rank, script, *arguments = sys.argv[1 + len(rank):]
sys.argv[:] = [script, *(rank if takes_rank == "rank" else []), *arguments]
sys.path[0] = "."
if "torchvision" in open(script).read():
    import torchvision.datasets as data
    class CIFAR10(data.FakeData):
        def __init__(self, root=None, train=True, download=False, transform=None):
            super().__init__(64, (3, 32, 32), 10, transform)
            self.classes = list(range(10))

    data.CIFAR10 = CIFAR10
if "transformers" in open(script).read():  # most scripts are for transformers 4: what they use of it comes back
    import torch
    import transformers
    import transformers.modeling_utils as models
    from transformers import initialization
    models.no_init_weights = initialization.no_init_weights
    transformers.AdamW = torch.optim.AdamW
    transformers.PreTrainedTokenizerBase.batch_encode_plus = transformers.PreTrainedTokenizerBase.__call__
    transformers.PreTrainedTokenizerFast.save_vocabulary = lambda *arguments: ()
if side.startswith("ours"):
    import anyaccel.interop
    anyaccel.interop.use_in_deepspeed()
elif side == "deepspeed":
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it takes minutes to compile
runpy.run_path(script, run_name="__main__")
"""

# Small models with random weights and a tokenizer of their own, and a few texts where examples look for data sets.
STAND_INS = """
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (AutoModelForCausalLM, BertConfig, BertForMaskedLM, GPT2Config, GPTNeoXConfig, LlamaConfig,
                          OPTConfig, PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM, T5Config,
                          T5ForConditionalGeneration)

root = Path(sys.argv[1])
lines = [f"The {a} {b} of the machine is {c} in autumn." for a in ("small", "large", "quick") for b in
         ("core", "node", "model", "leaf") for c in ("busy", "idle", "red", "slow")]
special = ["<pad>", "<s>", "</s>", "<unk>", "[MASK]", "[CLS]", "[SEP]"]
inner = Tokenizer(models.BPE(unk_token="<unk>"))
inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
inner.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=
                          pre_tokenizers.ByteLevel.alphabet()))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                    unk_token="<unk>", mask_token="[MASK]", cls_token="[CLS]", sep_token="[SEP]")
torch.manual_seed(0)
size = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
wide = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "max_position_embeddings": 512}
opt = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64,
       "max_position_embeddings": 512}
made = {
    "llama": AutoModelForCausalLM.from_config(LlamaConfig(**size, **wide, num_key_value_heads=4)),
    "neox": AutoModelForCausalLM.from_config(GPTNeoXConfig(**size, **wide)),
    "gpt2": AutoModelForCausalLM.from_config(GPT2Config(**size, n_embd=64, n_layer=2, n_head=4, n_positions=512)),
    "opt": AutoModelForCausalLM.from_config(OPTConfig(**size, **opt)),
    "reward": AutoModelForCausalLM.from_config(OPTConfig(**size, **opt)),
    "bert": BertForMaskedLM(BertConfig(**size, **wide)),
    "roberta": RobertaForMaskedLM(RobertaConfig(**size, **wide)),
    "t5": T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=2,
                                              num_heads=4, decoder_start_token_id=0)),
}
for name, model in made.items():
    model.save_pretrained(root / name)
    tokenizer.save_pretrained(root / name)
# A reward model is saved as DeepSpeed-Chat saves it: the base's weights below "rwtranrsformer", and one row of its own.
weights = {name.removeprefix("model."): value for name, value in made["reward"].state_dict().items()}
base = {f"rwtranrsformer.{name}": value for name, value in weights.items() if "lm_head" not in name}
torch.save(base | {"v_head.weight": torch.randn(1, 64) / 8}, root / "reward" / "pytorch_model.bin")
alpaca = [{"instruction": line, "input": "", "output": line} for line in lines]
chat = [{"prompt": f"Human: {line} Assistant:", "chosen": line, "rejected": line[:9]} for line in lines[:16]]
texts = [{"text": line} for line in lines]
(root / "alpaca.json").write_text(json.dumps(alpaca))
for place, rows in {"tatsu-lab/alpaca/train": alpaca, "chat/train": chat, "chat/eval": chat, "text/train": texts,
                    "text/validation": texts[:8], "wikitext/train": texts}.items():
    file = root / f"{place}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\\n".join(json.dumps(row) for row in rows))
(root / "wikitext" / "README.md").write_text(
    "---\\nconfigs:\\n- config_name: wikitext-2-v1\\n  data_files:\\n  - split: train\\n    path: train.json\\n---\\n")
"""


def run(example: Example, side: str, python: Path, checkout: Path, models: Path, limit: int) -> tuple[str, str]:
    """How it ends: "runs" or the sentence that says why not; and all that it has printed."""
    if side == "alias" and example.ranks > 1:  # what it lacks shows on one rank, and sooner
        alone = run(replace(example, ranks=1), side, python, checkout, models, limit)
        if alone[0] != "runs":
            return alone
    with tempfile.TemporaryDirectory() as temporary:
        root, work = Path(temporary, "examples"), Path(temporary, "work")
        work.mkdir()
        top = Path(example.script).parts[0]
        shutil.copytree(checkout / top, root / top)
        folder = root / Path(example.script).parent
        for place, model in example.beside.items():
            target = root / place if place.startswith(f"{top}/") else folder / place
            shutil.rmtree(target, ignore_errors=True)
            target.symlink_to(models / model)
        for name, text in example.files.items():
            (folder / name).write_text(text)
        starter = Path(temporary, "starter")
        starter.write_text(STARTER)
        ranks = ["--num_accelerators", str(example.ranks)]
        mode = {"alias": ["--as-deepspeed"], "ours as CUDA": ["--as-cuda"]}.get(side, [])
        command = [str(python), "-m", "anyaccel", "run", *ranks, *mode]
        takes_rank = "rank" if re.search("--local_rank|local_rank: int", sources(folder)) else "none"
        arguments = example.arguments.format(models=models, work=work).split()
        command += [str(starter), side, takes_rank, Path(example.script).name, *arguments]
        package = root / "applications" / "DeepSpeed-Chat"  # that its examples would have one install
        environment = {
            **os.environ,
            **({"PYTHONPATH": str(package)} if package.exists() else {}),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": temporary,
            "LOCAL_SIZE": str(example.ranks),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with Path(temporary, "log").open("w+") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            try:
                os.killpg(process.pid, signal.SIGKILL)  # and ranks that it has left
            except ProcessLookupError:
                code = process.wait()
            process.wait()
            log.seek(0)
            output = log.read()
    worked = code == 0 and re.search(example.shows, output)
    return "runs" if worked else reason(output, code, limit), output


def sources(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.glob("*.py"))


def reason(output: str, code: int | None, limit: int) -> str:
    """The last error of an output, without what differs from run to run."""
    if code is None:
        return f"does not end in {limit} s"
    errors = re.findall(
        r"^(?:\[[^\]]*\]:? ?)*((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b: .+)$", output, re.MULTILINE
    )
    errors = [each for each in errors if "ChildFailed" not in each] or [
        f"ends with exit code {code}, and without its result"
    ]
    return re.sub(r"/tmp/\S+/", "", errors[0]).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the repository DeepSpeedExamples")
    parser.add_argument("names", nargs="*", help="only examples whose path has one of these in it")
    parser.add_argument("--deepspeed", type=Path, required=True, help="a Python that has DeepSpeed")
    parser.add_argument("--plain", type=Path, required=True, help="a Python that has everything but DeepSpeed")
    parser.add_argument("--side", choices=SIDES, action="append", help="only these")
    parser.add_argument("--missing", action="store_true", help="only examples that the file of --write does not have")
    parser.add_argument("--write", type=Path, help="file for the outcome; other examples in it stay")
    parser.add_argument("--logs", type=Path, help="folder for what they print")
    parser.add_argument("--limit", type=int, default=240, help="seconds for one")
    options = parser.parse_args()
    lost = []
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        subprocess.run([options.plain, "-c", STAND_INS, folder], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        for number, example in enumerate(EXAMPLES):
            if options.names and not any(name in example.name for name in options.names):
                continue
            known = (
                json.loads(options.write.read_text())["examples"] if options.write and options.write.exists() else {}
            )
            if options.missing and example.name in known:
                continue
            row: dict[str, str] = {}
            for side in options.side or SIDES:
                if side == "ours as CUDA" and row.get("ours") == "runs":
                    continue
                python = options.plain if side == "alias" else options.deepspeed
                ends, output = run(example, side, python.absolute(), options.checkout, models, options.limit)
                row[side] = ends
                print(f"{example.name} | {side} | {ends}", flush=True)
                if options.logs:
                    options.logs.mkdir(exist_ok=True)
                    (options.logs / f"{number:02}-{side.replace(' ', '-')}.log").write_text(output)
            if row.get("deepspeed") == "runs" != row.get("ours", "runs"):
                lost.append(example.name)
            if options.write and not options.side:
                known[example.name] = row
                order = [each.name for each in EXAMPLES if each.name in known]
                options.write.write_text(
                    json.dumps({"examples": {name: known[name] for name in order}}, indent=1) + "\n"
                )
    print("\n".join(f"runs on DeepSpeed as it is only: {name}" for name in lost))
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
