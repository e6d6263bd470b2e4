"""Small random models of Hugging Face transformers, as the tests of the drop-in use them."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip

#: Name of the model to what its config says besides `SMALL`.
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "Qwen3": {},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
    "Phi3": {},
    "GptOss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    # A model that masks a sliding window, and does not tell the attention function of it.
    "Qwen2Moe": {
        "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
    },
}  # fmt: skip

#: Models that the library itself does not run on ``scaled_dot_product_attention``.
NO_SDPA = ("Gemma2", "GptOss")


def tiny(kind: str, dtype: Any = None, **options: Any) -> Any:
    """A random model of *kind*, ready for inference."""
    import torch
    import transformers

    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **KINDS[kind], **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("k_proj.weight", "q_proj.weight", "qkv_proj.weight", "sinks")):
                parameter.mul_(8)  # else every key weighs the same, and no mask could be told from another
    return model if dtype is None else model.to(dtype)


def prompts(rows: int = 2, tokens: int = 20, padding: int = 5) -> dict[str, Any]:
    """Token ids and mask of a batch whose first row is padded on the left."""
    import torch

    ids = torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    ids[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}
