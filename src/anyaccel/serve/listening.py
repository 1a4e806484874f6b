# SPDX-License-Identifier: Apache-2.0
"""The address of a server and the messages about it, without an import of the HTTP packages."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import shlex
import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from anyaccel.errors import MissingPackageError, UsageError
from anyaccel.extras import pip_line


@dataclass(frozen=True)
class ServerSettings:
    """How to serve; see `anyaccel serve --help`."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    page: bool = True
    drain_seconds: float = 30.0
    log_level: str = "info"
    json_logs: bool = False
    otlp_endpoint: str | None = None


def check(settings: ServerSettings) -> None:
    """Check the settings before a model is loaded.

    Raises:
        UsageError: a setting is wrong.
    """
    if (settings.ssl_keyfile is None) != (settings.ssl_certfile is None):
        raise UsageError("--ssl-keyfile and --ssl-certfile: both are needed, or none")
    for name, file in (("--ssl-keyfile", settings.ssl_keyfile), ("--ssl-certfile", settings.ssl_certfile)):
        if file is not None and not Path(file).is_file():
            raise UsageError(f"{name} {file}: no such file")
    if settings.ssl_certfile is not None:

        def ask() -> str:  # otherwise OpenSSL would ask on the terminal, here and again when the server starts
            raise UsageError(
                f"--ssl-keyfile {settings.ssl_keyfile}: is encrypted; write it without a password, for this user "
                f"alone: (umask 077; openssl pkey -in {settings.ssl_keyfile} -out plain.pem)"
            )

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, ask)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(
                f"--ssl-certfile {settings.ssl_certfile}: not a certificate with this key ({error})"
            ) from None
    if not all(key.isascii() and key.isprintable() and key == key.strip() for key in settings.keys):
        raise UsageError(
            "--api-key and ANYACCEL_API_KEY: a key has to be printable ASCII, without blanks at its ends, "
            "or no header can bring it"
        )
    if settings.otlp_endpoint is not None and not _is_http_address(settings.otlp_endpoint):
        raise UsageError(
            f"--otlp-endpoint {settings.otlp_endpoint}: must be a collector's address for OTLP over HTTP, as in "
            "http://127.0.0.1:4318"
        )
    if settings.otlp_endpoint is not None and find_spec("opentelemetry") is None:
        raise MissingPackageError(
            f"--otlp-endpoint needs OpenTelemetry: {pip_line('opentelemetry-sdk')}", "opentelemetry"
        )
    if settings.root_path and (not settings.root_path.startswith("/") or settings.root_path.endswith("/")):
        raise UsageError(f"--root-path {settings.root_path}: must begin with / and not end with it")


def _is_http_address(given: str) -> bool:
    try:
        parts = urlsplit(given)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        return False


def parse_origin(given: str) -> str:
    """A site as browsers name it: in lower case, and without its scheme's own port; "*" stays.

    Raises:
        UsageError: it is no site, or several.
    """
    if given == "*":
        return given
    try:
        parts = urlsplit(given)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
        is_site = bool(scheme and host) and parts[2:] == ("", "", "") and not set("*,@") & set(parts.netloc)
    except ValueError:
        is_site = False
    if not is_site:
        raise UsageError(
            f"--allowed-origins {given}: must be one site as in https://chat.example.com, without a path; "
            "the option may be given several times, and * means all sites"
        )
    name = f"[{host}]" if ":" in (host or "") else host
    default = {"http": 80, "https": 443}.get(scheme)
    return f"{scheme}://{name}" if port in (None, default) else f"{scheme}://{name}:{port}"


def parse_host(given: str) -> str:
    """A host name as browsers write it, in lower case.

    Raises:
        UsageError: it is no name, or more than a name.
    """
    try:
        host = urlsplit(f"//{given}").hostname or ""
    except ValueError:
        host = ""
    if not host or host not in (given.lower(), given.lower().strip("[]")) or set("*,%") & set(host):
        raise UsageError(
            f"--allowed-hosts {given}: must be one name as in chat.example.com, without scheme and port; the option "
            "may be given several times, and with --api-key every name is allowed"
        )
    return host


@contextlib.contextmanager
def bound_socket(settings: ServerSettings) -> Iterator[socket.socket]:
    """The socket of the address, bound before the model is loaded, so that an address in use is reported at once.

    Raises:
        UsageError: the address cannot be bound.
    """
    if settings.uds is None:
        with bind(settings.host, settings.port) as bound:
            yield bound
        return
    with bind_unix(settings.uds) as bound:
        try:
            yield bound
        finally:
            Path(settings.uds).unlink(missing_ok=True)


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket and listen, which shows another server that it is in use; clients wait for the model.

    Raises:
        UsageError: it cannot be bound.
    """
    bound = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
                probe.setblocking(False)
                with contextlib.suppress(BlockingIOError):  # its queue is full
                    probe.connect(path)
                raise OSError(errno.EADDRINUSE, "Address already in use")
            Path(path).unlink()  # of a server that was killed
        bound.bind(path)
        bound.listen()
    except OSError as error:
        bound.close()
        raise UsageError(f"--uds {path}: {error.strerror or error}; choose another path") from None
    return bound


def bind(host: str, port: int) -> socket.socket:
    """Bind the address before the model is loaded, so that an address in use is reported at once; do not listen yet.

    Raises:
        UsageError: the address cannot be bound.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        bound.bind(address)
        # Without this another server could bind the same address until one of them listens, and then fail.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        bound.close()
        advice = {
            errno.EADDRNOTAVAIL: "this machine has no such address: choose another --host",
            errno.EACCES: "choose a --port from 1024 on",
        }.get(error.errno or 0, "choose another --port")
        raise UsageError(f"--host {host} --port {port}: {error.strerror or error}; {advice}") from None
    return bound


def before_listening(bound: socket.socket) -> None:
    """Let the next server bind the address at once: closed connections would block it for a minute."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def is_reachable(host: str) -> bool:
    """Whether other machines can connect to the address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def address(settings: ServerSettings, port: int) -> str:
    """The server's URL for a user of this machine."""
    host = settings.host
    if settings.uds is not None:
        return f"http{'s' if settings.ssl_certfile else ''}://localhost{settings.root_path}"
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"


def curl(settings: ServerSettings, port: int, chats: bool) -> str:
    """A curl command that sends a request to the server, for the user to copy."""
    words = ["curl", *(["--unix-socket", settings.uds] if settings.uds else [])]
    words += [f"{address(settings, port)}/v1/{'chat/' if chats else ''}completions"]
    if settings.ssl_certfile:
        words += ["--cacert", settings.ssl_certfile]
    words += ["-H", "Content-Type: application/json"]
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        if chats
        else {"prompt": "The sky is blue, as"}
    )
    line = shlex.join([*words, "-d", json.dumps({**body, "max_tokens": 64})])
    # The shell inserts the key, so that it is in no history.
    return f'{line} -H "Authorization: Bearer $ANYACCEL_API_KEY"' if settings.keys else line


def warnings_of(settings: ServerSettings) -> Sequence[str]:
    """Warnings about who can reach the server."""
    if settings.uds is not None or not is_reachable(settings.host) or settings.keys:
        return []
    where = settings.host or "0.0.0.0"
    return [
        f"warning: {where} can be reached from other machines, and no key is needed to use the model; "
        "set ANYACCEL_API_KEY, or leave out --host"
    ]
