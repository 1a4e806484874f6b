# SPDX-License-Identifier: Apache-2.0
"""The API process: the application of `anyaccel serve` in front of replicas. Torch-free."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from anyaccel.inference.text.tokenizer import load_text_tokenizer
from anyaccel.serve.api.application import application
from anyaccel.serve.ray.options import ServeOptions
from anyaccel.serve.ray.remote import RemoteEngine
from anyaccel.serve.requests.defaults import SamplingDefaults, read_defaults
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.reasoning import REASONING_FORMATS
from anyaccel.serve.requests.tokenizer import ServerTokenizer
from anyaccel.serve.requests.tools.formats import FORMATS


class Api:
    """The deployment to which Ray's proxies route requests."""

    _engine: RemoteEngine | None = None

    async def __init__(self, options: ServeOptions, model: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        tokenizer = await asyncio.to_thread(load_text_tokenizer, options.path(), lambda text: None)
        reads = options.generation_config == "auto"
        defaults = await asyncio.to_thread(read_defaults, options.path()) if reads else SamplingDefaults()
        facts = await model.facts.remote()  # once a replica has loaded the model
        self._engine = RemoteEngine(model, facts, options.request_timeout)
        frontend = Frontend(
            self._engine,
            ServerTokenizer(tokenizer),
            options.names,
            options.aliases,
            root=options.path().name,
            pooling=options.pooling,
            tool_format=FORMATS.get(options.tool_format, "auto"),
            reasoning="auto" if options.reasoning_format == "auto" else REASONING_FORMATS.get(options.reasoning_format),
            defaults=defaults,
        )
        keys = [key.get_secret_value() for key in options.api_key]
        self._app = application(
            frontend, keys=keys, origins=options.allowed_origins, hosts=options.allowed_hosts, page=options.page
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        """Ray's question for the application, once this is made."""
        return self._app

    async def __del__(self) -> None:
        if self._engine is not None:
            with suppress(RuntimeError):  # its loop is gone
                await self._engine.close()
