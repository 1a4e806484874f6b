# SPDX-License-Identifier: Apache-2.0
"""`anyaccel embed`: embeddings of the lines of files."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from anyaccel.cli._parser import Parser
from anyaccel.cli._screen import Screen
from anyaccel.cli._texts import add_options, options_of, read_texts
from anyaccel.errors import UsageError

_EXAMPLES = """\
  anyaccel embed texts.txt --model ~/models/all-MiniLM-L6-v2 --output vectors.npy
  echo "Why is the sky blue?" | anyaccel embed --model ~/models/bge-m3 --dtype int8
  anyaccel embed queries.jsonl --model ~/models/Qwen3-Embedding-0.6B --prompt query"""
_TEXTS_AT_ONCE = 1024  # what is written before the next ones are made


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "embed",
        "Make embeddings of texts as sentence-transformers does with the same model folder: one JSON array a line.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add(
        "files",
        nargs="*",
        default=[],
        metavar="FILE",
        help='one text a line; in *.jsonl files a string or an object with a "text"; default or "-": standard input',
    )
    add_options(parser)
    add("--prompt", metavar="NAME", help="one of the model's named prompts, which is put before each text")
    add("--prompt-text", metavar="TEXT", help="this text is put before each text")
    add(
        "--pooling",
        choices=("mean", "cls", "last", "max"),
        help="of hidden states; default: what modules.json says, else the mean, or a causal model's last one",
    )
    add("--normalize", action="store_true", help="make embeddings of length 1 whatever the model's modules.json says")
    add("--output", "-o", metavar="FILE.npy", help="write one float32 array [texts, values] instead")
    add("--quiet", "-q", action="store_true", help="print no progress and speed")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = build_parser().parse_args(argv)
    if options.prompt is not None and options.prompt_text is not None:
        raise UsageError("--prompt and --prompt-text: give one of them")
    if options.output is not None and not Path(options.output).expanduser().parent.is_dir():
        raise UsageError(f"--output {options.output}: there is no folder {Path(options.output).parent}")
    folder, settings = options_of(options)
    texts = read_texts(options.files)
    import numpy

    from anyaccel.inference.encoders.embedder import Embedder

    screen = Screen(shown=not options.quiet)
    normalize = True if options.normalize else None
    with screen.loading():
        embedder = Embedder(folder, settings, options.pooling, normalize, screen.progress)
    prompt = options.prompt_text if options.prompt_text is not None else embedder.prompt(options.prompt)
    begin = time.monotonic()
    found = []
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        vectors = embedder.embed(texts[first : first + _TEXTS_AT_ONCE], prompt)
        if options.output is not None:
            found.append(vectors)
            continue
        for vector in vectors.tolist():
            sys.stdout.write(json.dumps([round(value, 8) for value in vector]) + "\n")
    if options.output is not None:
        with Path(options.output).expanduser().open("wb") as file:
            numpy.save(file, numpy.concatenate(found))
    took = time.monotonic() - begin
    screen.line(f"{len(texts)} texts in {took:.2f} s, {len(texts) / took:.1f} texts/s", "speed")
    return 0
