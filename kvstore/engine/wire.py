"""Sampling parameters and outputs of vLLM, as bytes between a worker and the gateway (msgpack, never pickle).

Only what an OpenAI response is made of travels. Prompt token ids do not: the gateway has them.
"""

from typing import Any

import msgspec
from vllm.logprobs import Logprob, SampleLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "RequestOutput",
    "RequestOutputKind",
    "decode_output",
    "decode_params",
    "encode_output",
    "encode_params",
]

_params_encoder = msgspec.msgpack.Encoder()
_params_decoder = msgspec.msgpack.Decoder(SamplingParams)


def encode_params(params: SamplingParams) -> bytes:
    return _params_encoder.encode(params)


def decode_params(data: bytes) -> SamplingParams:
    """Raises ValueError when `data` are not sampling parameters."""
    try:
        return _params_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not sampling parameters: {error}") from error


class _Completion(msgspec.Struct, array_like=True):
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[list[tuple[int, float, int | None, str | None]]] | None
    finish_reason: str | None
    stop_reason: int | str | None


class _Output(msgspec.Struct, array_like=True):
    completions: list[_Completion]
    finished: bool
    cached_tokens: int | None


_output_encoder = msgspec.msgpack.Encoder()
_output_decoder = msgspec.msgpack.Decoder(_Output)


def encode_output(output: RequestOutput) -> bytes:
    completions = [
        _Completion(
            index=one.index,
            text=one.text,
            token_ids=list(one.token_ids),
            cumulative_logprob=one.cumulative_logprob,
            logprobs=_pack_logprobs(one.logprobs),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
        )
        for one in output.outputs
    ]
    return _output_encoder.encode(_Output(completions, output.finished, output.num_cached_tokens))


def decode_output(
    data: bytes, request_id: str, prompt: str | None, prompt_token_ids: list[int]
) -> RequestOutput:
    """The engine's output as the gateway's serving code expects it."""
    packed = _output_decoder.decode(data)
    completions = [
        CompletionOutput(
            index=one.index,
            text=one.text,
            token_ids=one.token_ids,
            cumulative_logprob=one.cumulative_logprob,
            logprobs=_unpack_logprobs(one.logprobs),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
        )
        for one in packed.completions
    ]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=None,
        outputs=completions,
        finished=packed.finished,
        num_cached_tokens=packed.cached_tokens,
    )


def _pack_logprobs(
    logprobs: SampleLogprobs | None,
) -> list[list[tuple[int, float, int | None, str | None]]] | None:
    if logprobs is None:
        return None
    return [
        [(token, one.logprob, one.rank, one.decoded_token) for token, one in position.items()]
        for position in logprobs
    ]


def _unpack_logprobs(packed: Any) -> SampleLogprobs | None:
    if packed is None:
        return None
    return [
        {
            token: Logprob(logprob=logprob, rank=rank, decoded_token=text)
            for token, logprob, rank, text in position
        }
        for position in packed
    ]
