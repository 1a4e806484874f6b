# SPDX-License-Identifier: Apache-2.0
"""`anyaccel.serve.ray` on a Ray cluster of two nodes of this machine, one core each; run by .venv-ray.

TMPDIR is a folder with a short name, for Ray's sockets and the file of leases. Says what it does, a line each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from anyaccel.serve.ray import ServeOptions, app
from anyaccel.serve.ray.replica import Replica, cores_for
from anyaccel.topology import read_machine
from open_files import processes_with_files_below

LONG_S = 180.0
QUESTION = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
URL = ""


def say(text: str) -> None:
    print(f"{time.monotonic() - START:6.1f} s: {text}", flush=True)


def wait_for(what: str, look: Callable[[], Any], seconds: float = LONG_S) -> Any:
    """What `look` gives once it gives something."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    say(what)
    return found


def ask(path: str, value: Any = None) -> Any:
    body = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(URL + path, body, {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=LONG_S)


def answer(tokens: int, **more: Any) -> str:
    text: str = json.loads(ask("/v1/chat/completions", QUESTION | {"max_tokens": tokens} | more).read())["choices"][0][
        "message"
    ]["content"]
    return text


def events(tokens: int, **more: Any) -> Iterator[dict[str, Any]]:
    wanted = QUESTION | {"max_tokens": tokens, "stream": True} | more
    for line in ask("/v1/chat/completions", wanted):
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line[6:])


def status(path: str, value: Any = None) -> int:
    try:
        with ask(path, value) as found:
            code: int = found.status
            return code
    except urllib.error.HTTPError as error:
        return error.code


def metric(name: str) -> float:
    text = ask("/metrics").read().decode()
    return float(next(line for line in text.splitlines() if line.startswith(f"anyaccel_{name}{{")).split()[-1])


def replicas() -> dict[int, int]:
    """Process and the Ray node that it is of, as its raylet's process."""
    found = {}
    for process in processes_with_files_below(os.environ["TMPDIR"]):  # its log is open
        with suppress(OSError):  # it ends just now
            if b"ServeReplica:llm:model" in Path(f"/proc/{process}/cmdline").read_bytes():
                status = Path(f"/proc/{process}/status").read_text().splitlines()
                found[process] = int(next(line for line in status if line.startswith("PPid:")).split()[1])
    return found


def ready_replicas() -> int:
    """How many Ray sends requests to."""
    return serve.status().applications["llm"].deployments["model"].replica_states.get("RUNNING", 0)


def check_cores() -> None:
    """Each replica has one core with all its threads, and no two the same; each is of a node of its own."""
    found = replicas()
    assert len(found) == len(set(found.values())) == 2, found
    cores = []
    for process in found:
        threads = {tuple(os.sched_getaffinity(int(task.name))) for task in Path(f"/proc/{process}/task").iterdir()}
        assert len(threads) == 1, threads
        cores.append(threads.pop())
    assert all(len(each) == 1 for each in cores) and cores[0] != cores[1], cores
    say(f"replicas {list(found)} of nodes {list(found.values())} are bound to {cores}")


def the_api() -> str:
    text = answer(24)
    assert text
    parts = list(events(24, stream_options={"include_usage": True}))
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in parts if each["choices"]) == text
    assert len(parts) > 20 and parts[-1]["usage"]["completion_tokens"] == 24
    vector = json.loads(ask("/v1/embeddings", {"input": ["The sky", "is blue"]}).read())["data"][1]["embedding"]
    assert abs(sum(each * each for each in vector) - 1) < 1e-3
    several = json.loads(ask("/v1/chat/completions", QUESTION | {"max_tokens": 24, "n": 4}).read())["choices"]
    assert [each["message"]["content"] for each in several] == [text] * 4
    same = {"type": "json_object"}
    assert json.loads(answer(80, response_format=same)) is not None
    assert status("/v1/chat/completions", QUESTION | {"temperature": -1}) == 400
    assert status("/v1/chat/completions", QUESTION | {"model": "another"}) == 404
    assert status("/v1/completions", {"prompt": "a", "guided_regex": "("}) == 400
    assert status("/nothing") == 404
    assert [status(path) for path in ("/health", "/version", "/docs", "/")] == [200] * 4
    wait_for("the statistics have come", lambda: metric("generation_tokens_total") >= 24)
    say(f"the API answers: {text!r}")
    return text


def a_client_that_goes() -> None:
    stream = events(4000, ignore_eos=True)
    next(stream)
    wait_for("a long answer is under way", lambda: metric("num_requests_running") >= 1)
    stream.close()
    wait_for("it has ended with its client", lambda: metric("num_requests_running") == 0)


def more_replicas_while_requests_wait() -> None:
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            answer(200, ignore_eos=True)

    threads = [threading.Thread(target=keep_asking) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        wait_for("a second replica serves", lambda: ready_replicas() == 2)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def one_is_killed(text: str) -> None:
    failed: list[str] = []
    answered = [0]
    stop = threading.Event()

    def keep_asking(number: int) -> None:
        while not stop.is_set():
            try:
                told = answer(24, user=str(number))
                if told != text:
                    failed.append(told)
                answered[0] += 1
            except urllib.error.HTTPError as error:
                failed.append(f"{error.code} {error.read().decode()}")
            except OSError as error:
                failed.append(str(error))

    began = [events(600, ignore_eos=True) for _ in range(6)]  # more than one replica may have beside another
    for stream in began:
        next(stream)
    threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    victim = next(iter(replicas()))
    os.kill(victim, signal.SIGKILL)
    killed = answered[0]
    say(f"replica {victim} is killed")
    try:
        wait_for("requests go on", lambda: answered[0] >= killed + 4)
        wait_for(
            "a new replica serves", lambda: ready_replicas() == 2 and victim not in replicas() and len(replicas()) == 2
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    say(f"{answered[0]} requests were answered meanwhile, and failed: {failed}")
    # Those whose answer had begun may have been cut: nothing was lost silently.
    assert all(each.startswith("503") for each in failed) and len(failed) <= 2, failed
    ends = [list(stream)[-1] for stream in began]
    lost = [end for end in ends if "error" in end]
    whole = [end for end in ends if "error" not in end and end["choices"][0]["finish_reason"] == "length"]
    say(f"of {len(ends)} answers that had begun {len(whole)} came to their end, {len(lost)} ended with an error")
    assert lost and whole and len(lost) + len(whole) == len(ends), ends
    assert all(end["error"]["code"] == "engine_stopped" for end in lost)
    assert status("/ready") == 200


def a_conversation_stays() -> None:
    before, asked = metric("prefix_cache_hits_total"), metric("prefix_cache_queries_total")
    system = {"role": "system", "content": "You answer in few words, and never of anything but the sky. " * 20}
    for number in range(6):
        said = [system, {"role": "user", "content": f"What is {number}?"}]
        ask("/v1/chat/completions", {"messages": said, "max_tokens": 2}).read()
    time.sleep(2)
    hits, asked = metric("prefix_cache_hits_total") - before, metric("prefix_cache_queries_total") - asked
    say(f"of {asked:g} tokens of prompts that begin alike {hits:g} were in the cache")
    assert hits > 0.6 * asked  # five of six; were they to alternate it were four


def the_end() -> None:
    stream = events(300, ignore_eos=True)
    first = next(stream)
    gone = threading.Thread(target=lambda: serve.delete("llm"))
    gone.start()
    rest = [first, *stream]
    assert rest[-1]["choices"][0]["finish_reason"] == "length", rest[-1]
    gone.join(LONG_S)
    assert not gone.is_alive()
    wait_for("an open answer was ended before its replica", lambda: not replicas())


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


def add_node(cluster: Cluster, **more: Any) -> None:
    """One of Ray's nodes, of one core. It waits for half a minute for its own start, which may take longer."""
    for left in reversed(range(3)):
        # Of agents whose ports are known it waits for nothing.
        names = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
        ports = dict(zip(names, free_ports(3), strict=True))
        try:
            cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1", object_store_memory=100 << 20, **ports, **more)
            return
        except Exception as error:
            say(f"a node did not start: {error}")
            if not left:
                raise


def without_a_cluster() -> None:
    """What needs Ray to be imported, and nothing of it to run."""
    machine = read_machine()
    cores = len(machine.cores())
    assert cores_for(1, 1.0, machine) == 1 and cores_for(cores, float(cores), machine) == cores
    assert cores_for(2 * cores, 2.0 * cores, machine) == cores and cores_for(2, 4.0 * cores, machine) == 1

    class Dead:
        def alive(self) -> bool:
            return False

    replica: Any = object.__new__(Replica)
    replica._engine, replica._closed = Dead(), True
    try:
        import asyncio

        asyncio.run(replica.check_health())
    except RuntimeError as error:
        say(f"health: {error}")
    else:
        raise AssertionError("a replica whose engine is dead is healthy")


def main() -> None:
    global URL
    without_a_cluster()
    cluster = Cluster()
    try:
        add_node(cluster, include_dashboard=False)
        add_node(cluster)
        ray.init(address=cluster.address, namespace="serve", logging_level="warning", log_to_driver=False)
        say("two nodes are there")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        URL = f"http://127.0.0.1:{port}"
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        options = ServeOptions(
            num_cpus=1, max_replicas=2, replicas_per_node=1, target_ongoing_requests=1, max_batch=8, drain_seconds=60
        )
        serve.run(app(options), name="llm", route_prefix="/")
        say("the first replica serves")
        text = the_api()
        a_client_that_goes()
        more_replicas_while_requests_wait()
        check_cores()
        a_conversation_stays()
        one_is_killed(text)
        check_cores()
        the_end()
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    say("done")


if __name__ == "__main__":
    START = time.monotonic()
    main()
