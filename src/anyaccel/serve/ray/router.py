# SPDX-License-Identifier: Apache-2.0
"""Which replica of a Ray cluster gets a request: the same rule as among the replicas of one server (`Routes`)."""

from __future__ import annotations

import threading
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from anyaccel.serve.engine.replicas import Routes
from anyaccel.serve.ray.calls import ReplicaCall

_PAGES = 1 << 16  # assumed for the cache of a replica that has not reported its size


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Lives in the process that sends requests; Ray calls it in a thread of its own."""

    def initialize_state(self, shares: bool = True) -> None:
        """See `RequestRouterConfig.request_router_kwargs`."""
        self._routes: Routes[ReplicaID] = Routes(shares)
        self._sent: dict[str, tuple[ReplicaID, ReplicaCall]] = {}  # requests under way, by Ray's name for them
        self._lock = threading.Lock()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """A rank (Ray's word) of its own for each replica: Ray tries the next one where the best one is full."""
        call = _call(pending_request)
        there = {replica.replica_id: replica for replica in candidate_replicas}
        with self._lock:
            for gone in [replica for replica in self._routes.known() if replica not in self.curr_replicas]:
                self._routes.forget(gone)
            load = {replica: self._load(replica) for replica in there}
            order = self._routes.order(() if call is None else call.tokens, load)
        avoid = set() if call is None else call.avoid
        order.sort(key=lambda replica: replica in avoid)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[there[replica]] for replica in order]

    def _load(self, replica: ReplicaID) -> int:
        """The number of open requests: those of this process, or all that the replica has reported."""
        own = sum(1 for where, _ in self._sent.values() if where == replica)
        return max(own, self.replica_queue_len_cache.get(replica) or 0)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """A replica has taken a request."""
        call = _call(pending_request)
        if call is None:
            return
        call.replica = replica_id
        with self._lock:
            self._sent[pending_request.metadata.internal_request_id] = replica_id, call
            self._note(replica_id, call)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note the answered conversation, with which its next turn will begin."""
        with self._lock:
            sent = self._sent.pop(internal_request_id, None)
            if sent is not None:
                self._note(*sent)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica has ended."""
        super().on_replica_actor_died(replica_id)
        with self._lock:
            self._routes.forget(replica_id)

    def _note(self, replica_id: ReplicaID, call: ReplicaCall) -> None:
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            pages = replica.replica_metadata.get("cache_pages", _PAGES)
            self._routes.note(replica_id, list(call.tokens), pages)


def _call(pending_request: PendingRequest | None) -> ReplicaCall | None:
    """The call of a pending request, if it has one."""
    given: Any = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return given if isinstance(given, ReplicaCall) else None
