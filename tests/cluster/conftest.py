# SPDX-License-Identifier: Apache-2.0
"""Four hosts on this machine, made once a session (tools/test_cluster.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_hosts import LAUNCHERS, Hosts, test_cluster


# One for the session, made before the first test looks at its child processes.
@pytest.fixture(scope="session")
def _hosts() -> Iterator[Hosts]:
    if why := test_cluster.missing():
        pytest.skip(why)
    slurm_is_missing = test_cluster.missing(slurm=True)
    with test_cluster.Cluster(4) as cluster:
        if not slurm_is_missing:
            try:
                cluster.start_slurm()
            except test_cluster.ClusterError as error:
                slurm_is_missing = f"Slurm cannot be started here: {error}"
        yield Hosts(cluster, slurm_is_missing)


@pytest.fixture
def hosts(_hosts: Hosts) -> Iterator[Hosts]:
    """Four hosts; a test that leaves a process on one of them fails."""
    for host in _hosts.cluster:
        host.reconnect()
    yield _hosts
    left = _hosts.wait_idle(20)
    _hosts.cluster.kill_jobs()
    assert not left, f"the test leaves processes behind: {left}"


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, hosts: Hosts) -> str:
    """Each launcher that is there."""
    hosts.need(request.param)
    return str(request.param)


# What differs little from a case that stays, for launchers other than ssh: `make test` has half an hour.
_SIMILAR = ("fails_ends_the_job[{}-how1]", "leaves_nothing[{}-15]", "is_named[{}-nothere]")
# Theirs take 13 s each; pdsh goes through ssh as ssh does, and MPICH's mpiexec is Intel's.
_LONG = ("is_named[pdsh-nobody]", "is_named[mpich-nobody]")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave those cases to `make test-all`."""
    similar = {name.format(launcher) for launcher in LAUNCHERS if launcher != "ssh" for name in _SIMILAR}
    for item in items:
        if item.name.endswith((*similar, *_LONG)):
            item.add_marker(pytest.mark.slow)
