"""Writes tests/golden/qwen3_moe_tiny: a Qwen3-MoE of random weights as transformers saves it, with logits of a few
tokens; and tests/golden/moe_*.json: its sparse block alone, and Qwen3-Next's with the shared expert, with gradients.

Needs torch, transformers and safetensors. Run again only when a golden is to change; the result is committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from . import tiny_qwen3
from .tiny_qwen3 import GOLDEN, VERSIONS, torch, transformers

try:
    from safetensors import safe_open
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock
except ImportError as error:
    sys.exit(
        f"make_goldens_qwen3_moe: {error}; run this with a Python that has it: {sys.executable} does not"
    )

GRID = 4096  # inputs are multiples of 1/4096, so that short integers carry them exactly

SIZES = {
    "hidden_size": 16,
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
}
BLOCK_SIZES = {**SIZES, "hidden_size": 8, "moe_intermediate_size": 6}


def eager(config: Any) -> Any:
    """Expert by expert: the grouped product knows no f64."""
    config._experts_implementation = "eager"
    return config


def keep_f64() -> None:
    """The router asks softmax for f32 whatever the model's dtype; here f64 stays, so that goldens have all digits."""
    softmax = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim=None, dtype=None: softmax(
        x, dim=dim, dtype=torch.float64 if x.dtype == torch.float64 else dtype
    )


def margin(router: torch.Tensor, x: torch.Tensor) -> float:
    """Least distance between the probability of the last expert chosen and the first that was not."""
    p = torch.softmax((x @ router.T).double(), -1).sort(-1, descending=True).values
    return (p[:, SIZES["num_experts_per_tok"] - 1] - p[:, SIZES["num_experts_per_tok"]]).min().item()


def write_model() -> None:
    # Layer 1 is dense.
    config = transformers.Qwen3MoeConfig(
        **{**tiny_qwen3.SIZES, **SIZES}, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[1]
    )
    eager(config)
    seed = 0
    while True:  # until every choice of experts is clear
        torch.manual_seed(seed)
        model = transformers.Qwen3MoeForCausalLM(config).eval()
        seen = []
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                tiny_qwen3.change_norm(parameter)
                if name.endswith("mlp.gate.weight"):
                    parameter.normal_(std=1.0)
            mlp = model.model.layers[0].mlp
            mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
            tokens = tiny_qwen3.some_tokens()
            logits = model(tokens).logits[0]
        least = margin(mlp.gate.weight, seen[0][0])
        if least > 0.02:
            break
        seed += 1
    folder = tiny_qwen3.write_folder("qwen3_moe_tiny", model, tokens, logits, margin=least)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert "model.layers.0.mlp.experts.5.down_proj.weight" in weights.keys(), sorted(weights.keys())  # noqa: SIM118


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names of a checkpoint: transformers keeps experts stacked."""
    named = {}
    for name, t in tensors.items():
        for e in range(SIZES["num_experts"]):
            if name == "experts.gate_up_proj":
                named[f"experts.{e}.gate_proj.weight"], named[f"experts.{e}.up_proj.weight"] = t[e].chunk(2)
            if name == "experts.down_proj":
                named[f"experts.{e}.down_proj.weight"] = t[e]
        if not name.startswith("experts."):
            named[name] = t
    return named


def on_grid(t: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(t.shape), "grid": (t * GRID).round().long().flatten().tolist()}


def digits(t: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(t.shape), "data": [float(f"{x:.9g}") for x in t.detach().flatten().tolist()]}


def write_block(name: str, block: torch.nn.Module, config: Any) -> None:
    tokens, generator = 9, torch.Generator().manual_seed(1)
    block = block.double()

    def normal(shape: Sequence[int], std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * std * GRID).round() / GRID

    with torch.no_grad():
        for parameter_name, parameter in block.named_parameters():
            parameter.copy_(normal(parameter.shape, 0.6 if parameter_name == "gate.weight" else 0.3))
    router = block.gate.weight.detach()
    x = normal((64, BLOCK_SIZES["hidden_size"]), 1.0)
    clear = [t for t in range(64) if margin(router, x[t : t + 1]) > 0.02]
    x = x[clear[:tokens]].requires_grad_()
    dy = normal((tokens, BLOCK_SIZES["hidden_size"]), 1.0)
    y = block(x[None])[0]
    y.backward(dy)
    golden = {
        "config": {key: getattr(config, key) for key in (*BLOCK_SIZES, "norm_topk_prob")},
        "grid": GRID,
        "weights": {
            k: on_grid(v) for k, v in per_expert({n: p.detach() for n, p in block.named_parameters()}).items()
        },
        "x": on_grid(x.detach()),
        "dy": on_grid(dy),
        "y": digits(y),
        "dx": digits(x.grad),
        "gradients": {
            k: digits(v) for k, v in per_expert({n: p.grad for n, p in block.named_parameters()}).items()
        },
        **VERSIONS,
    }
    if hasattr(config, "shared_expert_intermediate_size"):
        golden["config"]["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    (GOLDEN / f"{name}.json").write_text(json.dumps(golden) + "\n")


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    write_model()
    keep_f64()
    for normalised in (True, False):
        suffix = "" if normalised else "_unnormalised"
        config = eager(transformers.Qwen3MoeConfig(**BLOCK_SIZES, norm_topk_prob=normalised))
        write_block(f"moe_qwen3{suffix}", Qwen3MoeSparseMoeBlock(config), config)
        config = eager(
            Qwen3NextConfig(**BLOCK_SIZES, shared_expert_intermediate_size=5, norm_topk_prob=normalised)
        )
        write_block(f"moe_qwen3_next{suffix}", Qwen3NextSparseMoeBlock(config), config)
