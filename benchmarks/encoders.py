# SPDX-License-Identifier: Apache-2.0
"""Texts a second of sentence-transformers with each of its backends and with `backend="anyaccel"`, in turn.

    python -m venv venv; venv/bin/pip install sentence-transformers[onnx,openvino] anyaccel[llm]
    venv/bin/python benchmarks/encoders.py [--backends torch onnx openvino] [--rounds 3]

The model has BERT-base's shape and random weights, which cost as much as trained ones. "mixed" texts have 8 to 256
tokens. Where optimum does not know the installed transformers, the same network is exported here, and runs in a session
of ONNX Runtime or OpenVINO in the place of the module. OpenVINO computes in bf16 where the processor has it. Ratios are
to the fastest other backend.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import anyaccel.inference

WORDS = [f"w{number}" for number in range(1000)]
# name -> backend and model_kwargs
OURS = {f"anyaccel {dtype}": ("anyaccel", {"dtype": dtype}) for dtype in ("fp32", "bf16", "int8")}
LEAST_S = 0.7  # of a measurement
LENGTHS: dict[str, tuple[int, int]] = {"16": (16, 16), "256": (256, 256), "mixed": (8, 256)}


def make_model(folder: Path) -> None:
    """A folder of sentence-transformers with a random model and a tokenizer of words."""
    import sentence_transformers
    import transformers
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate([*special, *WORDS])}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    plain = folder / "plain"
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=512, **dict(zip(names, special, strict=True))
    ).save_pretrained(plain)
    transformers.BertModel(transformers.BertConfig()).save_pretrained(plain)
    transformer = Transformer(str(plain), max_seq_length=512)
    pooling = Pooling(768)
    sentence_transformers.SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(folder / "model"))


class Exported(torch.nn.Module):
    """The network in another runtime, as transformers' model.

    Args:
        run: hidden states of input_ids, attention_mask and token_type_ids.
    """

    def __init__(self, run: Callable[[dict[str, Any]], Any], config: Any) -> None:
        super().__init__()
        self.run = run
        self.config = config

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": types}
        found = self.run({name: value.numpy() for name, value in given.items()})
        return BaseModelOutput(last_hidden_state=torch.from_numpy(found))


class _Hidden(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state


def export(folder: Path, backend: str, threads: int) -> Any:
    """sentence-transformers' model with the network in another runtime."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"attn_implementation": "eager"})
    hidden = _Hidden(model[0].model).eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = tuple(torch.ones(2, 8, dtype=torch.long) for _ in names)
    file = str(folder / "model.onnx")
    axes = {name: {0: "texts", 1: "tokens"} for name in (*names, "hidden")}
    torch.onnx.export(
        hidden,
        example,
        file,
        input_names=names,
        output_names=["hidden"],
        dynamic_axes=axes,
        dynamo=False,
        opset_version=17,
    )
    if backend == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        wanted = {each.name for each in session.get_inputs()}

        def run(given: dict[str, Any]) -> Any:
            return session.run(None, {name: value for name, value in given.items() if name in wanted})[0]

    else:
        import openvino

        compiled = openvino.Core().compile_model(
            file, "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        )
        known = {each.get_any_name() for each in compiled.inputs}

        def run(given: dict[str, Any]) -> Any:
            return compiled({name: value for name, value in given.items() if name in known})[0].copy()

    model[0].model = Exported(run, model[0].model.config)
    return model


def load(folder: Path, backend: str, more: dict[str, Any]) -> Any:
    """sentence-transformers' model with a backend."""
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(str(folder), device="cpu", backend=backend, model_kwargs=dict(more))
    except Exception as error:
        if backend not in ("onnx", "openvino") or (not isinstance(error, ImportError) and "Optimum" not in str(error)):
            raise
    return export(folder, backend, len(os.sched_getaffinity(0)))


def texts(kind: str, count: int) -> list[str]:
    """Texts with so many tokens, the two special ones included."""
    random.seed(0)
    least, most = LENGTHS[kind]
    return [" ".join(random.choices(WORDS, k=random.randint(least, most) - 2)) for _ in range(count)]


def measure(model: Any, batch: list[str]) -> float:
    """Texts a second of calls that follow each other: threads of the engine before have gone to sleep by then."""
    calls, begin = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begin < LEAST_S:
        model.encode(batch, batch_size=len(batch))
        calls += 1
    return calls * len(batch) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="*", default=["torch", "onnx", "openvino"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--lengths", nargs="*", default=list(LENGTHS))
    options = parser.parse_args()
    anyaccel.inference.add_to_sentence_transformers()
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place))
        loaded: dict[str, Any] = {}
        for name, (backend, more) in {**{each: (each, {}) for each in options.backends}, **OURS}.items():
            begin = time.perf_counter()
            try:
                loaded[name] = load(Path(place) / "model", backend, more)
            except Exception as error:  # noqa: BLE001  a peer that cannot run here is left out, and said
                print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            print(f"{name}: ready after {time.perf_counter() - begin:.1f} s", flush=True)
        print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} before\n")
        print("| tokens | batch | " + " | ".join(loaded) + " | bf16 to the best other |")
        print("| --- | ---: |" + " ---: |" * (len(loaded) + 1))
        for kind in options.lengths:
            for size in options.batches:
                batch = texts(kind, size)
                found: dict[str, list[float]] = {name: [] for name in loaded}
                for turn in range(options.rounds):
                    for name, model in loaded.items():
                        if turn == 0:  # memory of this size is taken
                            model.encode(batch[: max(1, size // 8)], batch_size=size)
                        found[name].append(measure(model, batch))
                best = {name: statistics.median(each) for name, each in found.items()}
                others = max(each for name, each in best.items() if name not in OURS)
                shown = " | ".join(f"{each:.1f}" for each in best.values())
                print(f"| {kind} | {size} | {shown} | {best['anyaccel bf16'] / others:.2f} |", flush=True)
        print(f"\nload {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
