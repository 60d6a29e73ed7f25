"""The configuration of the ways between nodes, as each node gets it."""

from pathlib import Path
from typing import Any

import pytest

from cluster.config import ConfigError, TransferConfig, load_config
from cluster.control.local import LocalCluster
from kvstore.node import NodeConfig


def transfer(**values: Any) -> TransferConfig:
    return load_config(flags={"pool": {"transfer": values}}, environ={}).pool.transfer


def node_config(**values: Any) -> NodeConfig:
    cluster = LocalCluster(load_config(flags={"pool": {"transfer": values}}, environ={}))
    try:
        return cluster._node("node-0").config
    finally:
        cluster.stop()


def test_all_links_may_be_used_unless_some_are_named() -> None:
    assert transfer().kinds == ("inline", "bulk", "nixl")
    assert transfer(links="bulk, inline").kinds == ("bulk", "inline")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"links": "bulk,rdma"}, "'rdma' is none of inline, bulk, nixl"),
        ({"links": ""}, "'' is none of"),
        ({"tcp_host": "127.0.0.1", "tls_ca": "a"}, "belong together"),
        ({"tls_ca": "a", "tls_cert": "b", "tls_key": "c"}, "set tcp_host too"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"pool\.transfer.*" + words):
        transfer(**values)


def test_nodes_listen_on_tcp_only_where_a_host_is_named(tmp_path: Path) -> None:
    local = node_config()
    assert (local.peer_address, local.tls) == ("", None)
    assert local.read_address.startswith("unix:")
    files = {name: str(tmp_path / name) for name in ("tls_ca", "tls_cert", "tls_key")}
    over_tcp = node_config(links="bulk", tcp_host="127.0.0.1", **files)
    assert over_tcp.links == ("bulk",)
    assert over_tcp.read_address.startswith("127.0.0.1:")
    assert over_tcp.tls is not None
    assert over_tcp.tls.key == tmp_path / "tls_key"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"policy": "astrology"}, "'astrology' is none of load, moonpool"),
        ({"policy": "cache_aware", "options": {"threshold": 2}}, "'cache_aware' has no option 'threshold'"),
        ({"overload": "panic"}, "overload"),
    ],
)
def test_scheduling_that_cannot_be_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="scheduling.*" + words):
        load_config(flags={"scheduling": values}, environ={})
    good = {"policy": "kvcache_centric", "options": {"threshold": 2}, "overload": "early"}
    assert load_config(flags={"scheduling": good}, environ={}).scheduling.options == {"threshold": 2.0}
