"""What an operator asks of one KV node, as lines of text: `moonpool pool`."""

from collections.abc import Callable

import grpc

from kvstore.transfer import kv_pb2 as pb
from kvstore.transfer.kv_pb2_grpc import KVNodeStub

_CALL_S = 10.0
_VERIFY_S = 3600.0
_MIB = 2**20


def inspect(name: str, address: str, tier: str) -> str:
    """How full the node's tiers are, and where blocks came from. Raises grpc.RpcError when the node does not answer."""
    with grpc.insecure_channel(address) as channel:
        status = KVNodeStub(channel).Status(pb.Empty(), timeout=_CALL_S)
    block_mib = status.block_bytes / _MIB
    return "\n".join(
        [
            f"{name}: blocks of {block_mib:.2f} MiB",
            (
                f"  dram  {status.committed} of {status.slots} slots hold blocks ({status.committed * block_mib:.0f} MiB), "
                f"{status.leased} are leased, {status.filling + status.draining} are being written; "
                f"{status.evictions} evictions"
            ),
            (
                f"  asked for {status.asked_blocks} blocks of prompts: {status.hit_dram_blocks} were in dram, "
                f"{status.fetched_ssd_blocks} came from the ssd, {status.fetched_peer_blocks - status.followed_blocks} "
                "from other nodes"
            ),
            (
                f"  ssd   {status.ssd_blocks} blocks ({status.ssd_blocks * status.ssd_block_bytes / _MIB:.0f} MiB)"
                + (f" as {status.ssd_codec}, which refused {status.ssd_refused}" if status.ssd_codec else "")
            ),
            (
                f"  handed over by the node that prefilled: {status.followed_blocks} blocks; "
                f"{status.fetch_failed_blocks} that were expected did not come"
            ),
            (
                f"  did not verify: {status.corrupt} in dram, {status.ssd_corrupt} on the ssd, "
                f"{status.rejected_segments} segments from other nodes"
            ),
            *map(_reads_from, status.neighbours),
        ]
    )


def _reads_from(there: pb.Neighbour) -> str:
    measured = ", ".join(
        f"{one.link} {one.bytes_per_s / 1e9:.2f} GB/s" for one in there.links if one.bytes_per_s
    )
    refused = "".join(f"; no {one.link}: {one.refused}" for one in there.links if one.refused)
    moved_mib = sum(one.read_bytes for one in there.links) / _MIB
    return (
        f"  reads from {there.address} by {there.link} ({measured or 'not measured'}{refused}): "
        f"{moved_mib:.0f} MiB, {there.lost_reads} reads were lost"
    )


def verify(name: str, address: str, tier: str) -> str:
    """Has the node read all its blocks. Raises grpc.RpcError when it does not answer."""
    with grpc.insecure_channel(address) as channel:
        reply = KVNodeStub(channel).Verify(pb.Empty(), timeout=_VERIFY_S)
    return (
        f"{name}: dram {reply.dram_blocks} blocks, {reply.dram_corrupt} did not verify; "
        f"ssd {reply.ssd_blocks} blocks, {reply.ssd_corrupt} did not verify"
    )


def drop(name: str, address: str, tier: str) -> str:
    """Has the node forget all blocks of a tier, or of both (""); those in use go when their readers are done."""
    with grpc.insecure_channel(address) as channel:
        reply = KVNodeStub(channel).Drop(pb.DropRequest(all=True, tier=tier), timeout=_CALL_S)
    return f"{name}: dropped {reply.dropped} blocks"


ACTIONS: dict[str, Callable[[str, str, str], str]] = {"inspect": inspect, "verify": verify, "drop": drop}
