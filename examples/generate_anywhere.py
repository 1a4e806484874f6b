# SPDX-License-Identifier: Apache-2.0
"""Generate with a local model on whatever accelerator there is, and say what runs it.

    python examples/generate_anywhere.py MODEL --tokens 16
    python examples/generate_anywhere.py MODEL --tokens 16 --runtime device

DS_ACCELERATOR chooses another device, for example simd0, that of extension/. MODEL is a folder (safetensors) or a .gguf
file. On a CPU the native runtime takes the model; elsewhere, or where `--runtime device` asks for it, the same decoder
runs in torch's operators. The tokens are the same.
"""

from __future__ import annotations

import argparse

import torch

import anyaccel


def main() -> None:
    parser = argparse.ArgumentParser(description="generation on any accelerator")
    parser.add_argument("model", help="folder or .gguf file")
    parser.add_argument("--prompt", default="5 17 99 3 64", help="numbers of tokens")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens to generate")
    parser.add_argument("--runtime", default="auto", help="auto, or one that is asked for")
    options = parser.parse_args()

    engine = anyaccel.init_inference(options.model, dtype=options.dtype, runtime=options.runtime)
    prompt = torch.tensor([[int(token) for token in options.prompt.split()]], device=engine.device)
    logits = engine(prompt).logits
    tokens = engine.generate(prompt, max_new_tokens=options.tokens, do_sample=False)
    print(f"runtime: {engine.runtime} on {engine.device}{', ' + engine.why if engine.why else ''}")
    print(f"likeliest next token: {int(logits[0, -1].argmax())}")
    print("tokens:", *tokens[0, prompt.shape[1] :].tolist())


if __name__ == "__main__":
    main()
