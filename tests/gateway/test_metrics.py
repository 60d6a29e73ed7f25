"""What the gateway's histograms mean."""

import time

from cluster.gateway.metrics import AnswerClock, Metrics


def test_the_gaps_of_n_choices_are_those_of_each() -> None:
    metrics = Metrics()
    clock = AnswerClock(metrics, time.time(), streamed=True)
    for _ in range(3):  # a step of the engine gives each choice a token
        clock.tokens(0, 1)
        clock.tokens(1, 1)
        time.sleep(0.05)
    total_s = metrics.registry.get_sample_value("moonpool_tbt_seconds_sum")
    count = metrics.registry.get_sample_value("moonpool_tbt_seconds_count")
    assert count == 4
    assert total_s is not None
    assert total_s / count >= 0.05
