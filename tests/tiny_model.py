"""A tiny random Llama, written as a Hugging Face folder in a second, for tests and benchmarks that need an engine.

Grouped-query attention, float32, a byte-level tokenizer of its own and SmolLM2's chat template: nothing is downloaded,
and equal arguments give equal bytes. Its weights are far larger than an initialisation's, so that attention is sharp:
a missing layer or two swapped blocks change the next token, which near-uniform attention would hide.
"""

from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2, as in SmolLM2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(
    path: Path, seed: int = 0, *, layers: int = 3, heads: int = 4, kv_heads: int = 2, head_dim: int = 32
) -> Path:
    """Writes the model to `path` and returns it. Its KV takes `2 * layers * kv_heads * head_dim * 4` bytes a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    hidden = heads * head_dim
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )
    chance = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = LlamaForCausalLM(config).to(torch.float32)
        for name, weight in sorted(model.named_parameters()):
            if "norm" not in name:  # [out, in]: unit variance in, about unit variance out
                weight.normal_(std=1.5 / weight.shape[-1] ** 0.5, generator=chance)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _tokenizer() -> Any:
    """One token a byte, after the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *letters))}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
    )
