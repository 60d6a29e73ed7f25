"""What workers refuse when it is asked of them directly."""

from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.transfer.server import OPTIONS
from prefill_worker import prefill_pb2
from prefill_worker.prefill_pb2_grpc import PrefillWorkerStub

if TYPE_CHECKING:
    from tests.cluster.conftest import Start


@pytest.mark.parametrize(("blocks", "tail"), [(0, True), (1, False), (2, True)])
async def test_names_that_do_not_fit_the_prompt(start: "Start", blocks: int, tail: bool) -> None:
    """Six tokens are one block of four and a tail: KV is never stored under names of other tokens."""
    cluster = await start()
    request = prefill_pb2.PrefillRequest(
        request_id="r",
        token_ids=range(6),
        hashes=[bytes([number]) * 32 for number in range(blocks)],
        tail_hash=b"t" * 32 if tail else b"",
        lease_s=1.0,
    )
    async with grpc.aio.insecure_channel(cluster.address("prefill-0"), options=OPTIONS) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in PrefillWorkerStub(channel).Prefill(request):
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
