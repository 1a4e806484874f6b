# SPDX-License-Identifier: Apache-2.0
"""Generate text with a local Hugging Face model that is divided among the workers of a job.

    anyaccel run --num_accelerators 2 --bind_cores_to_rank examples/generate_tp.py MODEL "Once upon a time"

MODEL is a folder (safetensors) or a .gguf file. Each worker reads only its shards; every worker gets the same tokens.
"""

from __future__ import annotations

import argparse

import anyaccel
from anyaccel import comm


def main() -> None:
    parser = argparse.ArgumentParser(description="tensor-parallel generation")
    parser.add_argument("model", help="folder or .gguf file")
    parser.add_argument("prompt")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16, fp32, int8 or int4")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens to generate")
    parser.add_argument("--local_rank", type=int, help="given by the launcher; not needed")
    options = parser.parse_args()

    anyaccel.init_distributed()
    engine = anyaccel.init_inference(
        options.model, dtype=options.dtype, tensor_parallel={"tp_size": comm.get_world_size()}
    )

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(options.prompt, return_tensors="pt").input_ids.to(engine.device)
    tokens = engine.generate(ids, max_new_tokens=options.tokens, do_sample=False)
    if comm.get_rank() == 0:
        print(tokenizer.decode(tokens[0], skip_special_tokens=True))
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
