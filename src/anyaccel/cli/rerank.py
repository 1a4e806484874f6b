# SPDX-License-Identifier: Apache-2.0
"""`anyaccel rerank`: the lines of files in the order in which they answer a query."""

from __future__ import annotations

import json
import sys
import time

from anyaccel.cli._parser import Parser
from anyaccel.cli._screen import Screen
from anyaccel.cli._texts import add_options, options_of, read_texts
from anyaccel.errors import UsageError

_EXAMPLES = """\
  anyaccel rerank "Why is the sky blue?" passages.txt --model ~/models/bge-reranker-v2-m3 --top 3
  grep -rh river notes/ | anyaccel rerank "Which bank has water?" --model ~/models/Qwen3-Reranker-0.6B --json"""


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "rerank",
        "Order texts by how well they answer a query, the best one first: score and text on each line.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("query", metavar="QUERY", help="what the texts are to answer")
    add(
        "files",
        nargs="*",
        default=[],
        metavar="FILE",
        help='one text a line; in *.jsonl files a string or an object with a "text"; default or "-": standard input',
    )
    add_options(parser)
    add("--top", type=int, metavar="N", help="print the best N texts only")
    add("--instruction", metavar="TEXT", help="what Qwen3-Reranker is to look for; default: its own for web search")
    add("--json", action="store_true", help="print one JSON object a line: index, score, text")
    add("--quiet", "-q", action="store_true", help="print no progress and speed")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = build_parser().parse_args(argv)
    if options.top is not None and options.top < 1:
        raise UsageError(f"--top {options.top}: must be at least 1")
    if not options.query.strip():
        raise UsageError("the query is empty")
    folder, settings = options_of(options)
    texts = read_texts(options.files)
    from anyaccel.inference.encoders.embedder import Reranker

    screen = Screen(shown=not options.quiet)
    with screen.loading():
        reranker = Reranker(folder, settings, options.instruction, screen.progress)
    begin = time.monotonic()
    for each in reranker.rank(options.query, texts, options.top):
        if options.json:
            line = json.dumps({"index": each.index, "score": each.score, "text": texts[each.index]})
        else:
            line = f"{each.score:.4f}\t{texts[each.index]}"
        sys.stdout.write(line + "\n")
    took = time.monotonic() - begin
    screen.line(f"{len(texts)} texts in {took:.2f} s, {len(texts) / took:.1f} texts/s", "speed")
    return 0
