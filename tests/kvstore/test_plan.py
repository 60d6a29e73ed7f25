"""What a plan refuses to be."""

import pytest

from kvstore.core.blocks import RequestId
from kvstore.engine.plan import KVPlan


@pytest.mark.parametrize("load_tokens", [-1, 5])
def test_a_plan_loads_no_more_than_the_prompt(load_tokens: int) -> None:
    with pytest.raises(ValueError, match="to load for a prompt of 4"):
        KVPlan(RequestId("r"), load=(), load_tokens=load_tokens, save=(), prompt_tokens=4, deadline_s=0.0)
