"""Writes tests/golden/*.json: what PyTorch computes for small attention layers, blocks, models, AdamW and Muon.

    scripts/make_goldens [FOLDER]        needs torch; with transformers, the baseline is also checked against Qwen3

The model below is a second reading of the papers' formulas, in plain torch and f64, with autograd for the gradients; it
shares nothing with the C++ code. Inputs are multiples of 1/4096, so that short integers carry them exactly."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import program

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    sys.exit(f"make_goldens: {error}; run this with a Python that has it: {sys.executable} does not")

GRID = 4096
torch.set_default_dtype(torch.float64)


def exact(shape: Sequence[int], std: float, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers on the grid."""
    return torch.round(torch.randn(*shape, generator=generator) * std * GRID) / GRID


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x (T, H, D), rotate-half."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half) / half)
    angle = positions[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


ACTIVATION = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "identity": lambda z: z,
    "ns_sigmoid": lambda z: 0.5 + 0.5 * torch.sigmoid(z),
}
PREFIX = {"query": "query_", "key": "key_", "value": "value_", "sdpa_output": "", "dense_output": "dense_"}


class Model:
    """Functions of a dictionary of weights under Hugging Face names."""

    def __init__(self, config: Any, generator: torch.Generator) -> None:
        self.c = config
        self.w = {}
        self.generator = generator

    def add(self, name: str, shape: Sequence[int], kind: Any) -> None:
        if kind == "norm":
            value = 1 + exact(shape, 0.1, self.generator)
        else:
            value = exact(shape, kind, self.generator)
        self.w[name] = value.requires_grad_()

    def add_attention(self, p: str) -> None:
        c = self.c
        C, H, Hkv, D = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        std = 1.2 / math.sqrt(C)
        for name, shape in {"q": (H * D, C), "k": (Hkv * D, C), "v": (Hkv * D, C), "o": (C, H * D)}.items():
            self.add(f"{p}.{name}_proj.weight", shape, std)
        for gate in c["gates"]:
            heads = {"key": Hkv, "value": Hkv, "dense_output": 1}.get(gate["position"], H)
            channels = C if gate["position"] == "dense_output" else D
            rows = heads * (channels if gate["granularity"] == "elementwise" else 1)
            self.add(f"{p}.{PREFIX[gate['position']]}gate_proj.weight", (rows, C), std)
        if c["qk_norm"]:
            self.add(f"{p}.q_norm.weight", (D,), "norm")
            self.add(f"{p}.k_norm.weight", (D,), "norm")
        if c["kind"] == "sink":
            self.add(f"{p}.sinks", (H,), 1.0)
        if c["output_norm"] != "none":
            self.add(f"{p}.o_norm.weight", (H, D), "norm")

    def add_block(self, p: str) -> None:
        C, width = self.c["hidden_size"], self.c["intermediate_size"]
        self.add(f"{p}.input_layernorm.weight", (C,), "norm")
        self.add_attention(f"{p}.self_attn")
        self.add(f"{p}.post_attention_layernorm.weight", (C,), "norm")
        for name, shape in {"gate": (width, C), "up": (width, C), "down": (C, width)}.items():
            self.add(f"{p}.mlp.{name}_proj.weight", shape, 1.2 / math.sqrt(C))
        if self.c["norm_placement"] == "sandwich":
            self.add(f"{p}.post_attention_branch_layernorm.weight", (C,), "norm")
            self.add(f"{p}.post_mlp_branch_layernorm.weight", (C,), "norm")

    def add_model(self) -> None:
        self.add("model.embed_tokens.weight", (self.c["vocab_size"], self.c["hidden_size"]), 0.7)
        for layer in range(self.c["num_hidden_layers"]):
            self.add_block(f"model.layers.{layer}")
        self.add("model.norm.weight", (self.c["hidden_size"],), "norm")
        if not self.c["tie_word_embeddings"]:
            self.add("lm_head.weight", (self.c["vocab_size"], self.c["hidden_size"]), 0.5)

    def gate(self, p: str, position: str, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for gate in self.c["gates"]:
            if gate["position"] != position:
                continue
            z = x @ self.w[f"{p}.{PREFIX[position]}gate_proj.weight"].T
            z = z.view(y.shape) if gate["granularity"] == "elementwise" else z[..., None]
            score = ACTIVATION[gate["activation"]](z)
            if gate["heads"] == "shared":
                score = score.mean(1, keepdim=True)
            y = y * score if gate["combine"] == "multiply" else y + score
        return y

    def attention(
        self, p: str, x: torch.Tensor, positions: torch.Tensor, first_key: torch.Tensor
    ) -> torch.Tensor:
        """x (T, C); query t sees keys first_key[t] .. t."""
        c, w, T = self.c, self.w, x.shape[0]
        H, Hkv, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q = self.gate(p, "query", (x @ w[f"{p}.q_proj.weight"].T).view(T, H, D), x)
        k = self.gate(p, "key", (x @ w[f"{p}.k_proj.weight"].T).view(T, Hkv, D), x)
        v = self.gate(p, "value", (x @ w[f"{p}.v_proj.weight"].T).view(T, Hkv, D), x)
        if c["qk_norm"]:
            q = rms_norm(q, w[f"{p}.q_norm.weight"], c["rms_norm_eps"])
            k = rms_norm(k, w[f"{p}.k_norm.weight"], c["rms_norm_eps"])
        q, k = rotate(q, positions, c["rope_theta"]), rotate(k, positions, c["rope_theta"])
        k, v = k.repeat_interleave(H // Hkv, 1), v.repeat_interleave(H // Hkv, 1)
        z = torch.einsum("thd,jhd->htj", q, k) / math.sqrt(D)
        j = torch.arange(T)
        z = z.masked_fill((j[None, :] > j[:, None]) | (j[None, :] < first_key[:, None]), -math.inf)
        if c["kind"] == "sink":  # an extra column without a value, as GPT-OSS writes it
            z = torch.cat([z, w[f"{p}.sinks"][:, None, None].expand(H, T, 1)], -1)
        a = torch.softmax(z, -1)[..., :T]
        o = torch.einsum("htj,jhd->thd", a, v)
        if c["output_norm"] != "none":
            o = rms_norm(o, w[f"{p}.o_norm.weight"], c["rms_norm_eps"])
        if c["output_activation"] == "silu":
            o = F.silu(o)
        o = self.gate(p, "sdpa_output", o, x).reshape(T, H * D)
        y = o @ w[f"{p}.o_proj.weight"].T
        return self.gate(p, "dense_output", y[:, None], x)[:, 0]

    def branch(self, name: str, y: torch.Tensor) -> torch.Tensor:
        if self.c["branch_clip"]:
            y = y.clamp(-self.c["branch_clip"], self.c["branch_clip"])
        if self.c["norm_placement"] == "sandwich":
            y = rms_norm(y, self.w[name], self.c["rms_norm_eps"])
        return y

    def block(
        self, p: str, x: torch.Tensor, positions: torch.Tensor, first_key: torch.Tensor
    ) -> torch.Tensor:
        w, eps = self.w, self.c["rms_norm_eps"]
        h = rms_norm(x, w[f"{p}.input_layernorm.weight"], eps)
        x = x + self.branch(
            f"{p}.post_attention_branch_layernorm.weight",
            self.attention(f"{p}.self_attn", h, positions, first_key),
        )
        h = rms_norm(x, w[f"{p}.post_attention_layernorm.weight"], eps)
        inner = F.silu(h @ w[f"{p}.mlp.gate_proj.weight"].T) * (h @ w[f"{p}.mlp.up_proj.weight"].T)
        return x + self.branch(
            f"{p}.post_mlp_branch_layernorm.weight", inner @ w[f"{p}.mlp.down_proj.weight"].T
        )

    def loss(
        self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor, first_key: torch.Tensor
    ) -> torch.Tensor:
        x = self.w["model.embed_tokens.weight"][tokens]
        for layer in range(self.c["num_hidden_layers"]):
            x = self.block(f"model.layers.{layer}", x, positions, first_key)
        x = rms_norm(x, self.w["model.norm.weight"], self.c["rms_norm_eps"])
        head = self.w["model.embed_tokens.weight" if self.c["tie_word_embeddings"] else "lm_head.weight"]
        return F.cross_entropy(x @ head.T, targets)


def configuration(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 24,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 16,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "qk_norm": True,
        "norm_placement": "pre",
        "branch_clip": None,
        "kind": "softmax",
        "gates": [],
        "output_norm": "none",
        "output_activation": "none",
        **changes,
    }


def gate(
    position: str = "sdpa_output",
    granularity: str = "elementwise",
    heads: str = "specific",
    combine: str = "multiply",
    activation: str = "sigmoid",
) -> dict[str, str]:
    return {
        "position": position,
        "granularity": granularity,
        "heads": heads,
        "combine": combine,
        "activation": activation,
        "input": "hidden",
    }


def grid(t: torch.Tensor) -> dict[str, Any]:
    """A tensor on the grid as integers."""
    return {"shape": list(t.shape), "grid": [round(v * GRID) for v in t.detach().flatten().tolist()]}


def full(t: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(t.shape), "data": [float(f"{v:.9g}") for v in t.detach().flatten().tolist()]}


def write(folder: str, name: str, content: dict[str, Any]) -> None:
    with open(os.path.join(folder, name + ".json"), "w") as f:
        json.dump(
            {"made_by": f"scripts/make_goldens, torch {torch.__version__}", "grid": GRID, **content},
            f,
            separators=(",", ":"),
        )
        f.write("\n")


def layer_golden(folder: str, name: str, kind: Any, config: Any, seed: int) -> None:
    """y, dx and every weight's gradient of one attention layer or block for a given x and dy."""
    generator = torch.Generator().manual_seed(seed)
    model = Model(config, generator)
    T = 9
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])  # two documents
    first_key = torch.tensor([0, 0, 0, 0, 0, 5, 5, 5, 5])
    x = exact((T, config["hidden_size"]), 1.0, generator).requires_grad_()
    dy = exact((T, config["hidden_size"]), 1.0, generator)
    if kind == "attention":
        model.add_attention("model.layers.0.self_attn")
        y = model.attention("model.layers.0.self_attn", x, positions, first_key)
    else:
        model.add_block("model.layers.0")
        y = model.block("model.layers.0", x, positions, first_key)
    y.backward(dy)
    write(
        folder,
        name,
        {
            "kind": kind,
            "config": config,
            "positions": positions.tolist(),
            "first_key": first_key.tolist(),
            "weights": {n: grid(w) for n, w in model.w.items()},
            "x": grid(x),
            "dy": grid(dy),
            "y": full(y),
            "dx": full(x.grad),
            "gradients": {n: full(w.grad) for n, w in model.w.items()},
        },
    )


def check_against_transformers(
    model: Any, tokens: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor
) -> str:
    """The ungated model is Qwen3: the same loss and gradients from an implementation that is not ours."""
    try:
        import transformers
    except ImportError:
        return "not checked: transformers is not installed"
    c = model.c
    config = transformers.Qwen3Config(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_hidden_layers=c["num_hidden_layers"],
        num_attention_heads=c["num_attention_heads"],
        num_key_value_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        rms_norm_eps=c["rms_norm_eps"],
        tie_word_embeddings=c["tie_word_embeddings"],
        max_position_embeddings=64,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": c["rope_theta"]},
        attn_implementation="eager",
    )
    theirs = transformers.Qwen3ForCausalLM(config).double()
    missing, unexpected = theirs.load_state_dict({n: w.detach() for n, w in model.w.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    theirs.tie_weights()
    logits = theirs(tokens[None]).logits[0].double()
    their_loss = F.cross_entropy(logits, targets)
    their_loss.backward()
    # Their norms and rotary angles are computed in f32.
    assert abs(their_loss.item() - loss.item()) < 1e-5, (their_loss.item(), loss.item())
    for name, parameter in theirs.named_parameters():
        ours = model.w[name].grad
        error = ((parameter.grad - ours).norm() / ours.norm()).item()
        assert error < 1e-5, (name, error)
    return f"agrees with transformers {transformers.__version__} Qwen3ForCausalLM to 1e-5"


def model_golden(
    folder: str, name: str, config: Any, seed: int, against_qwen3: bool = False, adamw_steps: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = Model(config, generator)
    model.add_model()
    T = 12
    stream = torch.randint(0, config["vocab_size"], (T + 1,), generator=generator)
    tokens, targets = stream[:-1], stream[1:]
    positions, first_key = torch.arange(T), torch.zeros(T, dtype=torch.long)
    start = {n: grid(w) for n, w in model.w.items()}
    loss = model.loss(tokens, targets, positions, first_key)
    loss.backward()
    content = {
        "kind": "model",
        "config": config,
        "tokens": tokens.tolist(),
        "targets": targets.tolist(),
        "weights": start,
        "loss": loss.item(),
        "gradients": {n: full(w.grad) for n, w in model.w.items()},
    }
    if against_qwen3:
        content["checked"] = check_against_transformers(model, tokens, targets, loss)
        print(f"{name}: {content['checked']}")
    if adamw_steps:
        options = {
            "lr": 0.02,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
        }
        matrices = [w for w in model.w.values() if w.dim() == 2]
        others = [w for w in model.w.values() if w.dim() != 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
            lr=options["lr"],
            betas=(options["beta1"], options["beta2"]),
            eps=options["eps"],
            weight_decay=options["weight_decay"],
        )
        losses, norms = [], []
        for _ in range(adamw_steps):
            optimizer.zero_grad()
            loss = model.loss(tokens, targets, positions, first_key)
            loss.backward()
            norms.append(torch.sqrt(sum((w.grad**2).sum() for w in model.w.values())).item())
            scale = min(1.0, options["max_grad_norm"] / norms[-1])
            for w in model.w.values():
                w.grad *= scale
            optimizer.step()
            losses.append(loss.item())
        watched = [
            "model.norm.weight",
            "model.layers.1.mlp.down_proj.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ]
        content["adamw"] = {
            **options,
            "losses": losses,
            "gradient_norms": norms,
            "weights_after": {n: full(model.w[n]) for n in watched},
        }
    write(folder, name, content)


def adamw_golden(folder: str) -> None:
    """Ten steps of torch.optim.AdamW on two parameters with given gradients, one of them not decayed."""
    generator = torch.Generator().manual_seed(7)
    a, b = (exact(shape, 1.0, generator).requires_grad_() for shape in [(5, 3), (7,)])
    options = {"lr": 0.05, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(
        [{"params": [a]}, {"params": [b], "weight_decay": 0.0}],
        lr=options["lr"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
    )
    content = {"kind": "adamw", **options, "start": [grid(a), grid(b)], "steps": []}
    for _ in range(10):
        a.grad, b.grad = exact(a.shape, 1.0, generator), exact(b.shape, 0.01, generator)
        optimizer.step()
        content["steps"].append({"gradients": [grid(a.grad), grid(b.grad)], "values": [full(a), full(b)]})
    write(folder, "adamw", content)


def orthogonalised(u: torch.Tensor, steps: int) -> torch.Tensor:
    """Newton-Schulz as Jordan et al. 2024 write it, in f64: on the transpose where there are more rows than columns."""
    tall = u.shape[0] > u.shape[1]
    x = u.T if tall else u
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def muon_golden(folder: str) -> None:
    """Six steps of Muon on a tall, a wide and a square matrix, momentum warming up, the gradient clipped by its global norm;
    with constant momentum and no clipping also against torch.optim.Muon, whose Newton-Schulz is in bf16."""
    generator = torch.Generator().manual_seed(11)
    shapes = [(6, 4), (4, 9), (5, 5)]
    options = {
        "lr": 0.02,
        "momentum": 0.95,
        "initial_momentum": 0.85,
        "momentum_warmup_steps": 4,
        "weight_decay": 0.1,
        "newton_schulz_steps": 5,
        "max_grad_norm": 2.0,
    }
    start = [exact(shape, 1.0, generator) for shape in shapes]
    gradients = [[exact(shape, 1.0, generator) for shape in shapes] for _ in range(6)]

    def run(momentum_at: Callable[[int], float], max_grad_norm: float | None) -> Any:
        w, m = [x.clone() for x in start], [torch.zeros_like(x) for x in start]
        history = []
        for step, gs in enumerate(gradients):
            norm = torch.sqrt(sum((g**2).sum() for g in gs))
            clip = min(1.0, max_grad_norm / norm.item())
            mu = momentum_at(step)
            for i, g in enumerate(gs):
                m[i] = mu * m[i] + (1 - mu) * g * clip
                update = orthogonalised(mu * m[i] + (1 - mu) * g * clip, options["newton_schulz_steps"])
                rows, columns = w[i].shape
                w[i] = w[i] * (1 - options["lr"] * options["weight_decay"])
                w[i] = w[i] - options["lr"] * math.sqrt(max(1.0, rows / columns)) * update
            history.append([x.clone() for x in w])
        return history

    theirs = [x.clone().float().requires_grad_() for x in start]
    optimizer = torch.optim.Muon(
        theirs,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        momentum=options["momentum"],
        nesterov=True,
        ns_steps=options["newton_schulz_steps"],
    )
    for gs in gradients:
        for w, g in zip(theirs, gs):
            w.grad = g.float()
        optimizer.step()
    ours = run(lambda step: options["momentum"], math.inf)[-1]
    moved = torch.sqrt(sum(((a - s) ** 2).sum() for a, s in zip(ours, start))).item()
    apart = torch.sqrt(sum(((a - b.double()) ** 2).sum() for a, b in zip(ours, theirs))).item()
    assert apart < 0.02 * moved, f"torch.optim.Muon is {apart} from this reading after moving {moved}"
    checked = (
        f"within {apart / moved:.1%} of the way that torch {torch.__version__} torch.optim.Muon goes in bf16"
    )
    print(f"muon: {checked}")

    def momentum_at(step: int) -> float:
        share = min(step / options["momentum_warmup_steps"], 1.0)
        return (1 - share) * options["initial_momentum"] + share * options["momentum"]

    history = run(momentum_at, options["max_grad_norm"])
    write(
        folder,
        "muon",
        {
            "kind": "muon",
            **options,
            "start": [grid(w) for w in start],
            "checked": checked,
            "steps": [
                {"gradients": [grid(g) for g in gs], "values": [full(w) for w in ws]}
                for gs, ws in zip(gradients, history)
            ],
        },
    )


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(program.ROOT, "tests", "golden")
    os.makedirs(folder, exist_ok=True)
    small = {"hidden_size": 8, "num_hidden_layers": 1}
    layer_golden(folder, "attention_plain", "attention", configuration(**small), 1)
    layer_golden(folder, "attention_elementwise", "attention", configuration(**small, gates=[gate()]), 2)
    layer_golden(
        folder,
        "attention_headwise",
        "attention",
        configuration(**small, gates=[gate(granularity="headwise")]),
        3,
    )
    layer_golden(folder, "attention_sink", "attention", configuration(**small, kind="sink"), 4)
    layer_golden(
        folder,
        "attention_five_gates",
        "attention",
        configuration(
            **small,
            qk_norm=False,
            output_norm="rmsnorm",
            output_activation="silu",
            gates=[
                gate("query", activation="silu"),
                gate("key", "headwise", activation="ns_sigmoid"),
                gate("value", heads="shared"),
                gate("sdpa_output", combine="add", activation="identity"),
                gate("dense_output"),
            ],
        ),
        5,
    )
    layer_golden(folder, "block_plain", "block", configuration(**small), 6)
    layer_golden(
        folder,
        "block_gated_sandwich_clip",
        "block",
        configuration(**small, norm_placement="sandwich", branch_clip=0.5, gates=[gate()]),
        7,
    )
    model_golden(folder, "model_plain", configuration(), 8, against_qwen3=True)
    model_golden(folder, "model_elementwise", configuration(gates=[gate()]), 9, adamw_steps=10)
    model_golden(
        folder,
        "model_headwise",
        configuration(tie_word_embeddings=False, gates=[gate(granularity="headwise")]),
        10,
    )
    adamw_golden(folder)
    muon_golden(folder)
