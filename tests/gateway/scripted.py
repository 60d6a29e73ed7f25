"""The engines' double for gateway tests: real token ids in, a scripted answer out, through vLLM's own output code.

What lies outside the gateway is imitated at its narrowest place, the choice of the next token. Detokenisation, stop
strings, logprob formatting, deltas and n > 1 are vLLM's, as on a decode node.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from cluster.gateway.openai import engine_config
from cluster.gateway.request import GatewayConfig, GenerateRequest

BOS, EOS = "<|im_start|>", "<|im_end|>"
CACHED_TOKENS = 3
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model_folder(folder: Path, generation: dict[str, object]) -> Path:
    """A model folder without weights: one token a byte, so that one character may span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **generation}))
    return folder


class ScriptedBackend:
    """Answers every prompt with `script`, one token each `step_s`, and remembers what it was asked and told."""

    def __init__(self, config: GatewayConfig) -> None:
        vllm_config = engine_config(config)
        self.renderer = renderer_from_config(vllm_config)
        self.tokenizer = self.renderer.get_tokenizer()
        self.inputs = InputProcessor(vllm_config, self.renderer)
        self.context_tokens: int = vllm_config.model_config.max_model_len
        self.reset()

    def reset(self) -> None:
        self.script = "The capital of France is Paris."
        self.step_s = 0.0
        self.refusal: Exception | None = None
        self.refuse_at_token = 0
        self.not_ready: str | None = None
        self.bug: Exception | None = None
        self.requests: list[GenerateRequest] = []
        self.live: set[str] = set()
        self.aborted: list[str] = []
        self.abort_seen = asyncio.Event()

    def ready(self) -> str | None:
        if self.bug is not None:
            raise self.bug
        return self.not_ready

    def status(self) -> dict[str, object]:
        return {"live": sorted(self.live)}

    def explain(self, request_id: str) -> dict[str, object] | None:
        known = {request.request_id: request for request in self.requests}
        return {"prompt_tokens": len(known[request_id].token_ids)} if request_id in known else None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        self.live.add(request.request_id)
        finished = False
        try:
            async for output in self._run(request):
                finished = output.finished
                yield output
        finally:
            self.live.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)
                self.abort_seen.set()

    async def _run(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        collector = RequestOutputCollector(request.sampling_params.output_kind, request.request_id)
        processor = OutputProcessor(self.tokenizer, log_stats=False)
        running = self._sequences(request, processor, collector)
        step = 0
        while running:
            await asyncio.sleep(self.step_s)
            if self.refusal is not None and step == self.refuse_at_token:
                raise self.refusal
            outputs = [self._next_token(sequence, step) for sequence in running.values()]
            stopped = processor.process_outputs(outputs).reqs_to_abort
            ended = {*stopped, *(output.request_id for output in outputs if output.finish_reason is not None)}
            running = {name: sequence for name, sequence in running.items() if name not in ended}
            if (output := collector.get_nowait()) is not None:
                assert isinstance(output, RequestOutput)
                yield output
            step += 1

    def _sequences(
        self, request: GenerateRequest, processor: OutputProcessor, collector: RequestOutputCollector
    ) -> dict[str, Request]:
        core = self.inputs.process_inputs(
            request.request_id,
            {"type": "token", "prompt_token_ids": list(request.token_ids)},
            request.sampling_params,
            supported_tasks=("generate",),
        )
        self.inputs.assign_request_id(core)
        parent = ParentRequest(core) if core.params.n > 1 else None
        cores: list[EngineCoreRequest] = []
        for index in range(core.params.n):
            child = EngineCoreRequest(**{f: getattr(core, f) for f in core.__struct_fields__})
            if parent is not None:
                child.request_id, child.sampling_params = parent.get_child_info(index)
            processor.add_request(child, None, parent, index, collector)
            cores.append(child)
        return {child.request_id: Request.from_engine_core_request(child, None) for child in cores}

    def _next_token(self, sequence: Request, step: int) -> EngineCoreOutput:
        params = sequence.sampling_params
        script = [*self.tokenizer.encode(self.script, add_special_tokens=False), 1]
        token = script[step % len(script)]
        if step < params.min_tokens and token in params.all_stop_token_ids:
            token = script[0]
        sequence.append_output_token_ids(token)
        stopped = check_stop(sequence, self.context_tokens)
        return EngineCoreOutput(
            request_id=sequence.request_id,
            new_token_ids=[token],
            new_logprobs=None if params.logprobs is None else self._logprobs(token, params.logprobs),
            finish_reason=sequence.get_finished_reason() if stopped else None,
            stop_reason=sequence.stop_reason,
            prefill_stats=PrefillStats(num_cached_tokens=CACHED_TOKENS) if step == 0 else None,
        )

    def _logprobs(self, token: int, count: int) -> LogprobsLists:
        others = [other for other in range(2, 3 + count) if other != token][: max(count - 1, 0)]
        tokens = np.array([[token, *([token] if count else []), *others]])
        return LogprobsLists(
            tokens, -0.5 * np.arange(tokens.shape[1], dtype=np.float32)[None, :], np.array([1])
        )
