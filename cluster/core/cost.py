"""Seconds: what a prefill, a transfer and a decode step will take, and how well that was predicted.

Coefficients are data: fitted for a (model, device) on start, then scaled by what is observed (`Fit`).  The forms are
those of a transformer: prefill has a part per call, a part per token and a part per (query, key) pair; a decode step
reads the weights once, does some work per stream and reads every stream's KV.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Fitted seconds. The defaults are those of SmolLM2-135M in float32 on one CPU core of a small server.

    There, prefill runs at about 190 tokens/s, one stream decodes 8 tokens/s and eight streams 45 tokens/s together.
    The pair and context terms follow from the model's shape: 69 kFLOP a (query, key) pair at the speed above, and
    46 kB of KV a token read at 5 GB/s.
    """

    prefill_base_s: float = 0.01
    prefill_token_s: float = 1 / 190
    prefill_pair_s: float = 1.4e-6
    step_base_s: float = 0.1175
    step_stream_s: float = 0.0075
    step_token_s: float = 9e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way for bytes to travel: a copy in one machine's memory, or a network."""

    latency_s: float
    bytes_per_s: float


def prefill_s(coefficients: Coefficients, cached_tokens: int, new_tokens: int) -> float:
    """Seconds to compute `new_tokens` after a prefix of `cached_tokens` that is already there."""
    pairs = new_tokens * (cached_tokens + new_tokens / 2)
    return (
        coefficients.prefill_base_s
        + coefficients.prefill_token_s * new_tokens
        + coefficients.prefill_pair_s * pairs
    )


def decode_step_s(coefficients: Coefficients, batch: int, context_tokens: int) -> float:
    """Seconds of one decode step for `batch` streams that hold `context_tokens` of KV together."""
    return (
        coefficients.step_base_s
        + coefficients.step_stream_s * batch
        + coefficients.step_token_s * context_tokens
    )


def fetch_s(kv_bytes: int, link: Link) -> float:
    """Seconds to bring `kv_bytes` over an otherwise idle `link`; nothing to bring takes no time."""
    return link.latency_s + kv_bytes / link.bytes_per_s if kv_bytes else 0.0


FIT_WEIGHT = 0.2
"""Weight of the newest observation: after ten, nine tenths of the scale come from what was seen."""
FIT_DOUBT = 0.05
"""Weight of having no observation, where one was refused for what the scale says."""
FIT_RATIO_MAX = 4.0
"""One observation counts at most this factor, either way: a stall must not teach that the worker is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Observed against predicted: a bounded factor that corrects predictions, and the error left after correcting.

    `error` is the moving mean of |observed / corrected prediction - 1|, itself bounded by the same factor.
    """

    scale: float = 1.0
    error: float = 0.0
    samples: int = 0

    def observe(self, predicted_s: float, observed_s: float) -> Fit:
        """The fit after one more observation; `predicted_s` is the uncorrected prediction."""
        if predicted_s <= 0 or observed_s <= 0:
            return self
        ratio = _bounded(observed_s / predicted_s)
        return Fit(
            scale=self.scale + FIT_WEIGHT * (ratio - self.scale),
            error=self.error + FIT_WEIGHT * (abs(ratio / self.scale - 1) - self.error),
            samples=self.samples + 1,
        )

    def relax(self) -> Fit:
        """The fit with its scale moved a little towards 1, for want of observations."""
        return replace(self, scale=self.scale + FIT_DOUBT * (1 - self.scale))


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / FIT_RATIO_MAX), FIT_RATIO_MAX)
