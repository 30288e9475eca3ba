"""A scheduler that speaks TLS alone, reached by certificates of a configuration or a client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest

from asynchooks import MonitoredSession, StopAtStepHook
from asynchooks.distributed import DaskCluster

pytest.importorskip("cryptography")  # makes the certificates
pytestmark = [pytest.mark.anyio, pytest.mark.faults]


@pytest.fixture(scope="module")
def security() -> Any:
    return distributed.Security.temporary()


@pytest.fixture(scope="module")
def tls_cluster(security: Any) -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=0,
        security=security,
        protocol="tls://",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    ) as cluster:
        yield cluster


@pytest.fixture
def configured(security: Any, tmp_path: Path) -> Iterator[None]:
    texts = {
        "ca-file": security.tls_ca_file,
        "client.cert": security.tls_client_cert,
        "client.key": security.tls_client_key,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    paths = {f"distributed.comm.tls.{name}": str(tmp_path / name) for name in texts}
    with dask.config.set(paths):
        yield


async def train(cluster: DaskCluster) -> int:
    """The step at which a training of 10 steps stops."""
    async with cluster:
        creator = cluster.session_creator(lambda: {"loss": 0.0})
        async with MonitoredSession([StopAtStepHook(last_step=10)], creator) as session:
            while not session.should_stop():
                await session.run("loss")
        return session.global_step.value


@pytest.mark.usefixtures("configured")
async def test_certificates_of_the_configuration_are_used_for_an_address(
    tls_cluster: Any, training: str
) -> None:
    assert tls_cluster.scheduler_address.startswith("tls://")
    assert await train(DaskCluster(tls_cluster.scheduler_address, training)) == 10


async def test_certificates_of_a_client_are_used(
    tls_cluster: Any, security: Any, training: str
) -> None:
    with distributed.Client(tls_cluster, security=security, set_as_default=False) as client:
        assert await train(DaskCluster(client, training)) == 10


async def test_without_certificates_the_error_names_what_is_missing(tls_cluster: Any) -> None:
    address = tls_cluster.scheduler_address
    with pytest.raises(ConnectionError, match=f"no certificates for {address}.*comm.tls"):
        await DaskCluster(address).open()


async def test_a_connection_without_tls_is_refused(tls_cluster: Any) -> None:
    address = tls_cluster.scheduler_address.replace("tls://", "tcp://")
    with pytest.raises(ConnectionError, match=f"no Dask scheduler answers at {address}"):
        await DaskCluster(address, timeout_secs=0.5).open()
