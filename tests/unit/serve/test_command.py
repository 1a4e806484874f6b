# SPDX-License-Identifier: Apache-2.0
"""`anyaccel serve` before it serves: options, addresses, names, and what it says where something is missing."""

from __future__ import annotations

import argparse
import errno
import json
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fuzz_models
from anyaccel.cli import main, serve
from anyaccel.cli._model_options import naming_options
from anyaccel.cli.serve import build_parser, names_of
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.checkpoints.adapters import CONFIG, WEIGHTS, check_adapter
from anyaccel.serve import listening
from anyaccel.serve.listening import ServerSettings
from anyaccel.serve.requests.defaults import SamplingDefaults, read_defaults


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--model", "b"], "one of them is enough"),
        (["--port", "65536"], "--port 65536"),
        (["--max-batch", "0"], "--max-batch 0: must be at least 1"),
        (["--tp", "0"], "--tp 0"),
        (["--replicas", "0"], "'0': must be a number from 1 on, or auto"),
        (["--drain-seconds", "-1"], "--drain-seconds -1"),
        (["--request-timeout", "0"], "--request-timeout 0"),
        (["--api-key", ""], "must not be empty"),
        (["--api-key", "schlüssel"], "printable ASCII"),
        (["--api-key", "from-a-file\n"], "printable ASCII"),
        (["--allowed-origins", "example.com"], "--allowed-origins example.com"),
        (["--allowed-origins", "http://a.org,http://b.org"], "one site as in https://chat.example.com"),
        (["--allowed-hosts", "https://a.org"], "one name as in chat.example.com"),
        (["--allowed-hosts", "a.org:80"], "one name as in chat.example.com"),
        (["--allowed-hosts", "*"], "--allowed-hosts *"),
        (["--uds", "/nonexistent/x.sock"], "--uds /nonexistent/x.sock: No such file or directory"),
        (["--uds", __file__], "Address already in use"),
        (["--host", "/nonexistent/x.sock"], "--uds /nonexistent/x.sock: No such file or directory"),
        (["--chat-template", "/nonexistent"], "--chat-template /nonexistent: no such file"),
        (["--ssl-keyfile", "x"], "both are needed"),
        (["--ssl-keyfile", "/nonexistent", "--ssl-certfile", "/nonexistent"], "no such file"),
        (["--ssl-keyfile", __file__, "--ssl-certfile", __file__], "not a certificate"),
        (["--root-path", "llm"], "--root-path llm"),
        (["/nonexistent/model"], "no such folder or file"),
        ([__file__, "/nonexistent/model"], "no such folder or file"),
        ([__file__, __file__], "two models are named"),
        ([__file__, "--alias", "test_command.py"], "two models are named"),
        ([__file__, "--alias", "x=y"], "--alias x=y: no model 'y' is given; there is test_command.py"),
        ([__file__, "--alias", ""], "must not be empty"),
        ([__file__, "--lora-modules", "/tmp"], "--lora-modules /tmp: must be NAME=FOLDER"),
        ([__file__, "--lora-modules", "a=/nonexistent"], "must be NAME=FOLDER of an adapter"),
        ([__file__, "--lora-modules", "a=/tmp", "--lora-modules", "a=/tmp"], "two models are named 'a'"),
        (["--models-dir", "/tmp", "--lora-modules", "a=/tmp"], "beside a model that is given"),
        ([__file__, __file__, "--served-model-name", "x"], "--alias NAME=MODEL gives one of them a name"),
        (["--models-dir", "/tmp", "--chat-template", __file__], "--chat-template: is for one model"),
        (["--models-dir", "/nonexistent"], "--models-dir /nonexistent: no such folder"),
        (["--memory", "-1"], "--memory -1"),
        (["--idle-seconds", "-1"], "--idle-seconds -1"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    result = capsys.readouterr().err
    assert said in result and result.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("http://localhost:5173", "http://localhost:5173"),
        ("HTTPS://Chat.Example.com", "https://chat.example.com"),
        ("https://a.org:443", "https://a.org"),
        ("http://a.org:80", "http://a.org"),
        ("http://a.org:443", "http://a.org:443"),
        ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("*", "*"),
        *((wrong, None) for wrong in ("a.org", "null", "", "a.org:80", "http://", "http://a.org/", "http://a.org/x")),
        *((wrong, None) for wrong in ("http://a.org,http://b.org", "https://*.a.org", "http://u@a.org", "http://a:x")),
    ],
)
def test_an_origin_is_what_browsers_send(given: str, origin: str | None) -> None:
    if origin is not None:
        assert listening.parse_origin(given) == origin
        return
    with pytest.raises(UsageError, match="--allowed-origins"):
        listening.parse_origin(given)


def test_a_host_is_a_name_in_lower_case() -> None:
    assert [listening.parse_host(each) for each in ("LLM.Example.com", "192.168.0.7", "[::1]")] == [
        "llm.example.com",
        "192.168.0.7",
        "::1",
    ]


def test_a_unix_socket_is_taken_by_one_server_and_left_by_none(tmp_path: Path) -> None:
    settings = ServerSettings(uds=str(tmp_path / "a.sock"))
    with listening.bound_socket(settings):
        with pytest.raises(UsageError, match="Address already in use"), listening.bound_socket(settings):
            pass
        assert (tmp_path / "a.sock").is_socket()
    assert not (tmp_path / "a.sock").exists()
    killed = listening.bind_unix(str(tmp_path / "a.sock"))
    killed.close()  # without removing the file
    with listening.bound_socket(settings):
        words = shlex.split(listening.curl(settings, 0, chats=True))
        assert words[:4] == ["curl", "--unix-socket", settings.uds, "http://localhost/v1/chat/completions"]
    assert not listening.warnings_of(ServerSettings(host="0.0.0.0", uds="x"))


def test_an_encrypted_key_is_not_asked_for(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 -subj /CN=x -passout pass:secret"
    command = [*made.split(), "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with pytest.raises(UsageError, match=f"--ssl-keyfile {re.escape(key)}: is encrypted"):
        listening.check(ServerSettings(ssl_keyfile=key, ssl_certfile=certificate))


@pytest.mark.parametrize(
    "given", ["", "x", "ftp://x", "127.0.0.1:4318", "http://", "http://[::1", "http://x:99999", "http://x:0"]
)
def test_a_collector_without_an_address_is_said(given: str) -> None:
    with pytest.raises(UsageError, match=f"--otlp-endpoint {re.escape(given)}: must be a collector's address"):
        listening.check(ServerSettings(otlp_endpoint=given))


def test_an_address_that_is_taken_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", __file__, "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EADDRNOTAVAIL, "another --host"), (errno.EACCES, "from 1024 on"), (0, "another --port")],
)
def test_why_an_address_cannot_be_had_decides_what_to_do(
    number: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(UsageError, match=advice):
        listening.bind("127.0.0.1", 80)


def test_lines_of_other_packages_are_json_too() -> None:
    program = """
    import logging.config
    from anyaccel.serve.listening import ServerSettings
    from anyaccel.serve.server import _log_config
    logging.config.dictConfig(_log_config(ServerSettings(json_logs=True)))
    for name in ("opentelemetry.exporter", "asyncio", "anyaccel.serve", "uvicorn.error"):
        logging.getLogger(name).warning("of %s", name)
        logging.getLogger(name).debug("too much")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in lines] == [
        "opentelemetry.exporter",
        "asyncio",
        "anyaccel.serve",
        "uvicorn.error",
    ]


def test_an_empty_host_is_every_address() -> None:
    with listening.bind("", 0) as taken:
        assert taken.getsockname()[0] in ("0.0.0.0", "::")


def test_two_servers_that_load_at_once_do_not_get_one_address() -> None:
    with listening.bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="Address already in use"):
            listening.bind("127.0.0.1", port)
        listening.before_listening(taken)
        taken.listen()
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = taken.accept()
        served.close()  # the server closes first: its end of the connection stays for a minute
        client.close()
    listening.bind("127.0.0.1", port).close()


def test_a_host_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match="--host nowhere: Name or service not known"):
        listening.bind("nowhere", 0)


def test_a_missing_package_is_one_line_that_says_which_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anyaccel.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    assert main(["serve"]) == 1
    result = capsys.readouterr().err
    assert "pip install 'anyaccel[serve]'" in result and result.count("\n") == 1


def test_who_can_come_is_known_and_said() -> None:
    for host, reachable in (
        ("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("localhost", False),
        ("0.0.0.0", True), ("::", True), ("192.168.0.7", True), ("", True), ("example.com", True),
    ):  # fmt: skip
        assert listening.is_reachable(host) == reachable, host
        assert bool(listening.warnings_of(ServerSettings(host=host))) == reachable
        assert not listening.warnings_of(ServerSettings(host=host, keys=("k",)))


def test_the_line_to_try_can_be_pasted() -> None:
    words = shlex.split(listening.curl(ServerSettings(host="0.0.0.0", root_path="/llm"), 81, chats=True))
    assert words[:2] == ["curl", "http://127.0.0.1:81/llm/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["messages"][0]["role"] == "user"
    line = listening.curl(ServerSettings(host="::1", keys=("sesame",), ssl_certfile="c.pem"), 81, chats=False)
    assert "https://[::1]:81/v1/completions" in line and "--cacert c.pem" in line
    assert "sesame" not in line and '"Authorization: Bearer $ANYACCEL_API_KEY"' in line


def test_a_model_has_its_files_name_unless_it_is_given_one(tmp_path: Path) -> None:
    file = tmp_path / "small.Q4_0.gguf"
    file.touch()

    def names(*arguments: str, model: Path) -> tuple[list[str], list[str]]:
        options: argparse.Namespace = build_parser().parse_args(list(arguments))
        return names_of(model, next(iter(options.given), None), options.served_model_name)

    assert names(model=file) == (["small.Q4_0"], [str(file)])
    assert names("~/x", model=tmp_path) == ([tmp_path.name], ["~/x", str(tmp_path)])
    assert names("--served-model-name", "a", "--served-model-name", "b", model=file) == (["a", "b"], [])


def test_what_a_model_recommends_is_read_of_its_folder_or_file(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults() and SamplingDefaults().describe() == ""
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": [1, 2]}')
    assert read_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20)
    assert read_defaults(tmp_path).describe() == "temperature 0.6, top_k 20"
    for text, said in (('{"temperature": "hot"}', "temperature='hot'"), ('{"top_p": 2}', "top_p=2"), ("[", "not JSON")):
        file.write_text(text)
        with pytest.raises(ModelError, match=said):
            read_defaults(tmp_path)
    gguf = fuzz_models.healthy_gguf("llama")
    keys = {"temp": (fuzz_models.F32, 0.7), "penalty_repeat": (fuzz_models.F32, 1.1), "top_k": (fuzz_models.U32, 40)}
    gguf.pairs |= {f"general.sampling.{name}": value for name, value in keys.items()}
    (tmp_path / "m.gguf").write_bytes(gguf.content())
    assert read_defaults(tmp_path / "m.gguf") == SamplingDefaults(temperature=0.7, repetition_penalty=1.1, top_k=40)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "max_context=9000: the model's context has 8192 tokens",
            "--max-context 9000: the model's context has 8192 tokens",
        ),
        ("max_contexts=9000: no option", "max_contexts=9000: no option"),
        ("a model: max_context=9000", "a model: max_context=9000"),
    ],
)
def test_a_value_that_the_model_refuses_is_said_by_its_option(text: str, named: str) -> None:
    options = build_parser().parse_args(["--max-context", "9000"])
    with pytest.raises(UsageError, match=f"^{re.escape(named)}$"), naming_options(options):
        raise UsageError(text)


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyaccel.cli.serve import _settings

    monkeypatch.setenv("ANYACCEL_API_KEY", "sesame")
    assert _settings(build_parser().parse_args(["--api-key", "other"])).keys == ("other", "sesame")


def test_each_adapter_makes_the_first_model_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Path, str]] = []
    monkeypatch.setattr(
        "anyaccel.serve.engine.opening.open_engine", lambda path, options, *_, **__: opened.append((path, options.lora))
    )
    monkeypatch.setattr(
        "anyaccel.inference.native.runtime.open_checkpoint", lambda _path, lora: check_adapter(Path(lora))
    )
    folders = [tmp_path / name for name in ("dates", "tone")]
    for folder in folders:
        folder.mkdir()
        (folder / CONFIG).write_text("{}")
        (folder / WEIGHTS).touch()
    modules = [each for folder in folders for each in ("--lora-modules", f"{folder.name}={folder}")]
    options = build_parser().parse_args([__file__, "--served-model-name", "base", *modules])
    choices = serve._choices(options)
    assert [each.names for each in choices] == [["base"], ["dates"], ["tone"]]
    for each in choices:
        serve._load_engine(options, each, serve._Log(), None, 0, None, None)
    assert opened == [(Path(__file__), lora) for lora in ("", *map(str, folders))]
    (folders[1] / WEIGHTS).unlink()  # said before the first model is loaded, not to the first request
    with pytest.raises(ModelError, match="tone: is no adapter of PEFT"):
        serve._choices(options)
