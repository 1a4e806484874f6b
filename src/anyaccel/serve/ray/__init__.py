# SPDX-License-Identifier: Apache-2.0
"""`anyaccel serve` on a Ray cluster: `serve run anyaccel.serve.ray:app model=... num_cpus=...`; see docs/serving.md.

Ray Serve places replicas, starts them again, and has more or fewer of them; each is bound to cores of its own here.
"""

# Annotations are not postponed: Ray evaluates that of `app`.

from importlib.util import find_spec
from typing import TYPE_CHECKING

from anyaccel.errors import AnyAccelError
from anyaccel.serve.ray.options import ServeOptions

if TYPE_CHECKING:
    from ray import serve

__all__ = ["ServeOptions", "app"]

_OPEN = 1000  # open requests of an API process
_AFTER_DRAIN = 10.0  # seconds that a process has to end after its requests have ended


def app(options: ServeOptions) -> "serve.Application":
    """The application; `serve run` and Serve's configuration files make the options of their arguments.

    Raises:
        UsageError: the model is not there.
        AnyAccelError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise AnyAccelError("serving on Ray needs more packages: pip install 'anyaccel[ray]' (no ray)")
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from anyaccel.serve.ray.api import Api
    from anyaccel.serve.ray.replica import Replica
    from anyaccel.serve.ray.router import PrefixRouter

    options.path()
    end = {"graceful_shutdown_wait_loop_s": 0.5, "graceful_shutdown_timeout_s": options.drain_seconds + _AFTER_DRAIN}
    autoscaling = None
    if options.replicas is None:
        autoscaling = AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=max(options.min_replicas, options.max_replicas),
            target_ongoing_requests=options.target_ongoing_requests or max(1.0, options.max_batch / 2),
        )
    replica = serve.deployment(
        Replica,
        name="model",
        num_replicas=options.replicas,
        autoscaling_config=autoscaling,
        max_replicas_per_node=options.replicas_per_node,
        ray_actor_options={"num_cpus": options.cpus},
        max_ongoing_requests=options.admitted,
        max_queued_requests=options.max_waiting,
        logging_config={"enable_access_log": False},  # the process that speaks HTTP has a line a request
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"shares": options.prefix_cache}
        ),
        **end,
    )
    api = serve.deployment(
        serve.ingress()(Api),
        name="api",
        num_replicas=options.api_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_OPEN,
        **end,
    )
    return api.bind(options, replica.bind(options))
