"""Models of Sluice for transformers: attention with gates at five positions, sinks, windows, switch heads,
sparse attention and everything else that a Sluice configuration can say, under the parameter names of its
checkpoints. Used with trust_remote_code=True. Letters: B sequences, T tokens, S tokens with those of the
cache, C hidden size, H heads, D head dimension.

Losses that only train (of routers, head balance, indexers) are not computed here: a fine-tuning leaves an
indexer as it is.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from .configuration_sluice import SluiceConfig

ACTIVATIONS = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "identity": lambda z: z,
    "ns_sigmoid": lambda z: 0.5 + 0.5 * torch.sigmoid(z),
    "two_sigmoid": lambda z: 2 * torch.sigmoid(z),
}
# What transformers calls the cache: since 5.24 `cache` in every place where it was `past_key_values`.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
GATE_PREFIX = {p: p + "_" for p in ("query", "key", "value")} | {"sdpa_output": "", "dense_output": "dense_"}


def linear(inputs, outputs, bias=False):
    """A projection, whose bias starts at 0."""
    module = nn.Linear(inputs, outputs, bias=bias)
    if bias:
        nn.init.zeros_(module.bias)
    return module


def wide_type(x):
    """In which sums, scores and angles of x are computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class SluiceRMSNorm(nn.Module):
    """x / rms(x) in f32, times a weight where there is one, over the last dimension."""

    def __init__(self, config, *shape):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(shape)) if config.norm_weights else None

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y if self.weight is None else y * self.weight.to(y.dtype)).to(x.dtype)


class SluiceGatedNorm(SluiceRMSNorm):
    """The norm before a branch, with GatedNorm's low-rank gate where there is one: n * sigmoid(U silu(D n))."""

    def __init__(self, config):
        C, rank = config.hidden_size, config.gated_norm["rank"]
        super().__init__(config, C)
        self.gate_down = nn.Linear(C, rank, bias=False) if rank else None
        self.gate_up = nn.Linear(rank, C, bias=False) if rank else None

    def forward(self, x):
        n = super().forward(x)
        return n if self.gate_up is None else n * torch.sigmoid(self.gate_up(F.silu(self.gate_down(n))))


class SluiceRotaryEmbedding(nn.Module):
    """Rotate-half rotary positions, with YaRN (Peng et al. 2023)."""

    def __init__(self, config, dim):
        super().__init__()
        rope, theta = config.rope_parameters, config.rope_parameters["rope_theta"]
        frequency = [theta ** (-2 * i / dim) for i in range(dim // 2)]
        self.scale = 1.0
        if rope.get("rope_type", "default") == "yarn":
            factor, length = rope["factor"], rope["original_max_position_embeddings"]

            def dimension(rotations):
                return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

            low, high = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
            if rope.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            high += 0.001 if high == low else 0
            for i in range(dim // 2):
                ramp = min(max((i - low) / (high - low), 0.0), 1.0)
                frequency[i] = frequency[i] / factor * ramp + frequency[i] * (1 - ramp)
            scale = rope.get("attention_factor")
            self.scale = 0.1 * math.log(factor) + 1 if scale is None else scale
        self.frequency = frequency

    def forward(self, x, position_ids):
        """cos and sin (B, T, 1, D) for heads in the third dimension; angles in f64, as in Sluice's table."""
        frequency = torch.tensor(self.frequency, dtype=torch.float64, device=position_ids.device)
        angles = position_ids[..., None].double() * frequency
        angles = torch.cat((angles, angles), -1)[:, :, None, :]
        wide = wide_type(x)
        return (angles.cos() * self.scale).to(wide), (angles.sin() * self.scale).to(wide)


def rotate(x, positions):
    cos, sin = positions
    first, second = x.to(cos.dtype).chunk(2, -1)
    return (torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def eager_attention(
    module, query, key, value, attention_mask, scaling, dropout=0.0, s_aux=None, extra_value=None, **kwargs
):
    """Attention (B, H, T, D) by softmax or softpick. s_aux (H) or (B, H, T): one more logit per head, which
    takes weight and has the value extra_value (key/value heads, D), or none."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(2, 3) * scaling
    wide = wide_type(logits)
    logits = logits.to(wide)
    if attention_mask is not None:
        logits = logits + attention_mask[..., : key.shape[2]].to(wide)
    rest = None  # the weight of the extra logit
    if getattr(module, "softpick", False):
        weights = softpick(logits)
    elif s_aux is not None:
        extra = s_aux.to(wide).view(1, -1, 1) if s_aux.dim() == 1 else s_aux.to(wide)
        extra = extra.expand(logits.shape[:3])[..., None]
        weights, rest = torch.cat((logits, extra), -1).softmax(-1).split([logits.shape[-1], 1], -1)
    else:
        weights = logits.softmax(-1)
    weights = F.dropout(weights, dropout, module.training).to(value.dtype)
    output = weights @ value
    if extra_value is not None:
        output = output + rest.to(value.dtype) * extra_value.repeat_interleave(groups, 0)[:, None, :]
    return output.transpose(1, 2).contiguous(), weights


def softpick(logits):
    """relu(e^z - 1) / (sum |e^z - 1| + 1e-6) over the keys that are not masked (Zuhri et al. 2025)."""
    largest = logits.amax(-1, keepdim=True).clamp(min=0)
    difference = torch.exp(logits - largest) - torch.exp(-largest)
    difference = difference.masked_fill(logits < torch.finfo(logits.dtype).min / 4, 0)
    return difference.relu() / (difference.abs().sum(-1, keepdim=True) + 1e-6 * torch.exp(-largest))


def apply_gate(x, z, gate):
    """x (..., H, D) combined with the scores of logits z: (..., H * D) or (..., H), or without the leading
    dimensions."""
    heads = x.shape[-2]
    z = z.reshape(*z.shape[: z.dim() - 1], heads, -1) if z.dim() >= x.dim() - 1 else z.reshape(heads, -1)
    wide = z if z.dtype == torch.float64 else z.float()
    activation = ACTIVATIONS[gate["activation"]]
    if gate["heads"] == "shared_before_activation":
        scores = activation(wide.mean(-2, keepdim=True))
    else:
        scores = activation(wide)
        if gate["heads"] == "shared":
            scores = scores.mean(-2, keepdim=True)
    wide_x = x.to(scores.dtype)
    return (wide_x * scores if gate["combine"] == "multiply" else wide_x + scores).to(x.dtype)


class SluiceConstantGate(nn.Module):
    """The learned logits of a gate that does not depend on the input."""

    def __init__(self, gate, heads, channels):
        super().__init__()
        headwise = gate["granularity"] == "headwise"
        shape = [heads] if headwise else [channels] if heads == 1 else [heads, channels]
        self.weight = nn.Parameter(torch.zeros(shape))


class SluiceIndexer(nn.Module):
    """The keys that sparse attention attends to: scores of J small heads, which share one key per token, and
    the exact choice of the largest of every query, ties to the latest."""

    def __init__(self, config):
        super().__init__()
        self.sparse = config.attention["sparse"]
        about, C = self.sparse["indexer"], config.hidden_size
        J, D = about["heads"], about["head_dim"]
        self.heads, self.head_dim = J, D
        self.sets = config.num_key_value_heads if self.sparse["scope"] == "kv_head" else 1
        self.scale = D**-0.5 if about["scale"] is None else about["scale"]
        weighted = about["head_weights"] != "none"
        self.query_proj = nn.Linear(C, J * D, bias=False)
        self.key_proj = nn.Linear(C, D, bias=False)
        self.weights_proj = nn.Linear(C, J, bias=about["bias"]) if weighted else None
        self.bias = nn.Parameter(torch.zeros(J)) if about["bias"] else None
        self.key_norm = SluiceRMSNorm(config, D) if about["key_norm"] else None
        if self.sparse["loss"]["learn_temperature"]:
            self.log_temperature = nn.Parameter(torch.zeros(1))  # of the indexer's loss alone
        if self.sparse["k"]["policy"] in ("eq8", "inverse", "code"):
            self.register_buffer("mean_variance", torch.zeros(1))

    def keys(self, hidden, rope):
        """(B, T, D), as they are cached."""
        keys = self.key_proj(hidden)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        return keys if rope is None else rotate(keys[:, :, None, :], rope)[:, :, 0, :]

    def scores(self, hidden, rope, keys):
        """(B, sets, T, N) of keys (B, N, D)."""
        query = self.query_proj(hidden).unflatten(-1, (self.heads, self.head_dim))
        query = query if rope is None else rotate(query, rope)
        wide = wide_type(query)
        products = torch.einsum("btjd,bnd->bjtn", query.to(wide), keys.to(wide)) * self.scale
        if self.bias is not None:
            products = products + self.bias.to(wide)[:, None, None]
        about = self.sparse["indexer"]
        scores = torch.sigmoid(products) if about["activation"] == "sigmoid" else F.relu(products)
        if self.weights_proj is not None:
            weights = F.linear(hidden, self.weights_proj.weight).to(wide)
            if self.weights_proj.bias is not None:
                weights = weights + self.weights_proj.bias.to(wide)
            weights = torch.sigmoid(weights) if about["head_weights"] == "sigmoid" else weights
            scores = scores * weights.transpose(1, 2)[..., None]
        return scores.unflatten(1, (self.sets, -1)).sum(2)

    def budget(self, scores, candidates, number):
        """How many of its `number` candidates a query selects (B, sets, T)."""
        k = self.sparse["k"]
        base = float(k["base"])
        if k["policy"] == "fixed":
            return number.clamp(max=k["base"])
        count = number.clamp(min=1).double()
        scores = scores.double().masked_fill(~candidates, 0)
        if k["policy"] == "entropy":
            share = scores.masked_fill(~candidates, -math.inf).softmax(-1).nan_to_num(0)
            entropy = -torch.special.xlogy(share, share).sum(-1)
            size = base * (0.5 + k["temperature"] * entropy / torch.log(count + 1))
        else:
            mean = (scores.sum(-1) / count)[..., None]
            variance = ((scores - mean) ** 2).masked_fill(~candidates, 0).sum(-1) / count
            usual = self.mean_variance.double()
            if k["policy"] == "eq8":
                size = base * variance / usual
            elif k["policy"] == "inverse":
                size = base * usual / variance.clamp(min=1e-30)
            else:
                size = base * (0.5 + 1 / (1 + k["temperature"] * variance / usual))
            size = torch.where(usual > 0, size, base)
        return torch.minimum(size.floor().clamp(k["min"], k["max"]).long(), number)

    def choose(self, scores, candidates, own):
        """The k largest scores among the candidates (B, 1, T, N); own (T): a column that comes first."""
        number = candidates.sum(-1).expand(scores.shape[:-1])
        k = self.budget(scores, candidates, number)
        scores = scores.masked_fill(~candidates, -math.inf)
        if own is not None:
            columns = torch.arange(scores.shape[-1], device=scores.device)
            scores = scores.masked_fill(columns == own[:, None], math.inf)
        order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        taken = torch.arange(scores.shape[-1], device=scores.device) < k[..., None]
        return torch.zeros_like(taken).scatter(-1, order, taken).flip(-1) & candidates

    @torch.no_grad()
    def forward(self, hidden, rope, keys, visible):
        """Which of the visible keys (B, T, S) each query attends to (B, sets, T, S)."""
        T, S, block = hidden.shape[1], keys.shape[1], self.sparse["block"]
        at = torch.arange(S, device=keys.device)
        if block == 1:
            own = at[S - T :] if self.sparse["force_self"] else None
            return self.choose(self.scores(hidden, rope, keys), visible[:, None], own)
        # Blocks are counted from the first token that is no padding; those alike have equal means, to the bit.
        start = visible[:, -1:].int().argmax(-1)
        number = (at - start) // block  # of every key's block (B, S)
        blocks = torch.arange((S + block - 1) // block, device=keys.device)
        wide = wide_type(keys)
        rows = (start + torch.arange(len(blocks) * block, device=keys.device)).clamp(max=S - 1)
        members = keys.to(wide).gather(1, rows[..., None].expand(-1, -1, self.head_dim))
        means = members.unflatten(1, (-1, block)).mean(2).to(keys.dtype)
        own = number[:, S - T :, None]
        chosen = self.choose(self.scores(hidden, rope, means), (blocks < own)[:, None], None)
        column = number.clamp(min=0)[:, None, None, :].expand(*chosen.shape[:3], S)
        return (chosen.gather(-1, column) | (number[:, None, :] == own)[:, None]) & visible[:, None]


def visible_keys(attention_mask, query, keys):
    """(B, T, S) of a mask (B, 1, T, S): truth, or what is added to logits; None is causal."""
    B, T, S = query.shape[0], query.shape[2], keys
    if attention_mask is None:
        causal = torch.ones(T, S, dtype=torch.bool, device=query.device).tril(S - T)
        return causal.expand(B, T, S)
    mask = attention_mask[:, 0, :, :S].expand(B, T, S)
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


class SluiceAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        attention, C, D = config.attention, config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, D
        self.num_key_value_groups = self.heads // self.kv_heads
        self.scaling, self.is_causal = D**-0.5, True
        self.switch = attention.get("switch_heads") or {"num_experts": 0}
        experts = {"k": self.experts_of("key_value"), "v": self.experts_of("key_value", "value")}
        width = self.switch.get("expert_width") or D
        self.q_proj = linear(C, self.heads * D, config.attention_bias)
        for what, number in experts.items():
            rows = self.kv_heads * (number * width if number else D)
            setattr(self, what + "_proj", linear(C, rows, config.attention_bias))
            if number:
                setattr(self, what + "_switch", nn.Linear(C, self.kv_heads * number, bias=False))
        self.o_proj = linear(self.heads * D, C, config.attention_bias)
        self.gates = []  # (description, name of its module), in the order in which they are applied
        for gate in attention["gates"]:
            self.gates.append((gate, self.add_gate(gate)))
        self.q_norm = SluiceRMSNorm(config, D) if config.qk_norm else None
        self.k_norm = SluiceRMSNorm(config, D) if config.qk_norm else None
        kind = attention["kind"]
        self.is_sparse = kind == "sparse" and attention["sparse"]["phase"] == "sparse"
        self.indexer = SluiceIndexer(config) if kind == "sparse" else None
        self.add_sink("sink" if kind == "sparse" and attention["sparse"]["sink"] else kind)
        self.sliding_window = (
            config.sliding_window if config.layer_types[layer_idx] != "full_attention" else None
        )
        self.exclusive = attention["exclusive"]
        self.exclusive_scale = nn.Parameter(torch.zeros(self.heads)) if self.exclusive == "learned" else None
        norm = attention["output_norm"]
        shape = (self.heads, D) if norm == "rmsnorm" else (D,)
        self.o_norm = SluiceRMSNorm(config, *shape) if norm != "none" else None
        self.output_silu = attention["output_activation"] == "silu"

    def add_sink(self, kind):
        H, D = (self.heads, self.kv_heads)[kind == "kv_bias"], self.head_dim
        self.softpick, self.off_by_one = kind == "softpick", kind == "off_by_one"
        self.sinks = nn.Parameter(torch.zeros(H)) if kind == "sink" else None
        self.sink_key = nn.Parameter(torch.zeros(H, D)) if kind == "sink_key" else None
        self.bias_key = nn.Parameter(torch.zeros(H, D)) if kind == "kv_bias" else None
        self.bias_value = nn.Parameter(torch.zeros(H, D)) if kind == "kv_bias" else None

    def sink(self, query):
        """What joins the keys of all tokens: the logits s_aux (H) or (B, H, T), and their value."""
        if self.off_by_one:
            return {"s_aux": query.new_zeros(self.heads)}
        if self.sinks is not None:
            return {"s_aux": self.sinks}
        key = self.sink_key if self.sink_key is not None else self.bias_key
        if key is None:
            return {}
        key = key.repeat_interleave(self.heads // key.shape[0], 0)
        logits = torch.einsum("bhtd,hd->bht", query, key) * self.scaling
        return {"s_aux": logits, "extra_value": self.bias_value}

    def experts_of(self, *projections):
        return self.switch["num_experts"] if self.switch.get("projections", "value") in projections else 0

    def add_gate(self, gate):
        position = gate["position"]
        heads = {"key": self.kv_heads, "value": self.kv_heads, "dense_output": 1}.get(position, self.heads)
        channels = self.config.hidden_size if position == "dense_output" else self.head_dim
        before = sum(other["position"] == position for other, _ in self.gates)
        name = (
            GATE_PREFIX[position]
            + {"hidden": "gate_proj", "self": "self_gate_proj", "none": "gate"}[gate["input"]]
        )
        name += f"_{before + 1}" if before else ""
        if gate["input"] == "none":
            self.add_module(name, SluiceConstantGate(gate, heads, channels))
            return name
        rows = heads * (1 if gate["granularity"] == "headwise" else channels)
        columns = gate.get("input_channels") or self.config.hidden_size
        columns = heads * channels if gate["input"] == "self" else columns
        projection = nn.Linear(columns, rows, bias=gate.get("bias") is not None)
        if projection.bias is not None:
            nn.init.constant_(projection.bias, gate["bias"])
        self.add_module(name, projection)
        return name

    def gate_logits(self, gate, module, x, hidden):
        if gate["input"] == "none":
            return module.weight
        return module(x.flatten(-2) if gate["input"] == "self" else hidden[..., : module.in_features])

    def gated(self, position, x, hidden):
        """x (B, T, H, D) behind all gates of a position."""
        for gate, name in self.gates:
            if gate["position"] == position:
                x = apply_gate(x, self.gate_logits(gate, getattr(self, name), x, hidden), gate)
        return x

    def without_own_value(self, output, value):
        """Exclusive self attention: output (B, T, H, D) without its component along the token's own value."""
        wide = wide_type(value)
        value = value.to(wide).repeat_interleave(self.num_key_value_groups, 2)
        square = value.square().sum(-1, keepdim=True)
        inverse = torch.where(square >= torch.finfo(wide).tiny, 1 / square, torch.zeros_like(square))
        part = (output.to(wide) * value).sum(-1, keepdim=True) * inverse
        if self.exclusive_scale is not None:
            part = part * self.exclusive_scale[:, None].to(wide)
        return (output.to(wide) - part * value).to(output.dtype)

    def project(self, what, hidden):
        """Keys or values (B, T, heads, D): one projection, or the sum of the chosen experts'."""
        projected = getattr(self, what + "_proj")(hidden)
        B, T, H, D = *hidden.shape[:2], self.kv_heads, self.head_dim
        if not hasattr(self, what + "_switch"):
            return projected.view(B, T, H, D)
        logits = getattr(self, what + "_switch")(hidden).view(B, T, H, -1)
        E = logits.shape[-1]
        projected = projected.view(B, T, H, E, -1)
        width = projected.shape[-1]
        chosen = logits.topk(self.switch["num_experts_per_tok"], -1).indices
        dtype = wide_type(logits)
        share = torch.zeros_like(logits, dtype=dtype).scatter(-1, chosen, 1.0)
        wide = (projected * (share * torch.sigmoid(logits.to(dtype))).to(projected.dtype)[..., None]).to(
            dtype
        )
        result = torch.zeros(B, T, H, D, dtype=dtype, device=wide.device)
        for expert in range(E):
            at = expert * width % D
            result[..., at : at + width] += wide[..., expert, :]
        return result.to(projected.dtype)

    def with_index_keys(self, key, index_keys):
        """Keys (B, heads, T, D), then the indexer's, in as many heads as these fill: one cache for both."""
        width = -index_keys.shape[-1] % self.head_dim
        heads = F.pad(index_keys, (0, width)).unflatten(-1, (-1, self.head_dim))
        return torch.cat((key, heads.transpose(1, 2)), 1)

    def selected(self, query, hidden, rope, index_keys, attention_mask):
        """What is added to the logits (B, H, T, S): the smallest number where a key is not selected."""
        index_keys = index_keys.transpose(1, 2).flatten(-2)[..., : self.indexer.head_dim]
        visible = visible_keys(attention_mask, query, index_keys.shape[1])
        chosen = self.indexer(hidden, rope, index_keys, visible)
        chosen = chosen.repeat_interleave(self.heads // chosen.shape[1], 1)
        wide = wide_type(query)
        nothing = torch.zeros((), dtype=wide, device=query.device)
        return nothing.expand(chosen.shape).masked_fill(~chosen, torch.finfo(wide).min)

    def position(self, x, norm, rope):
        if norm is None:
            return rotate(x, rope)
        before = self.config.qk_norm_order == "before_rope"
        return rotate(norm(x), rope) if before else norm(rotate(x, rope))

    def forward(
        self, hidden, rope, attention_mask=None, past_key_values=None, index_rope=None, **kwargs
    ):
        B, T = hidden.shape[:2]
        query = self.gated("query", self.q_proj(hidden).view(B, T, self.heads, self.head_dim), hidden)
        key = self.gated("key", self.project("k", hidden), hidden)
        own = self.gated("value", self.project("v", hidden), hidden)
        query = self.position(query, self.q_norm, rope).transpose(1, 2)
        key, value = self.position(key, self.k_norm, rope).transpose(1, 2), own.transpose(1, 2)
        if self.is_sparse:
            key = self.with_index_keys(key, self.indexer.keys(hidden, index_rope))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if self.is_sparse:
            key, index_keys = key.split((self.kv_heads, key.shape[1] - self.kv_heads), 1)
            attention_mask = self.selected(query, hidden, index_rope, index_keys, attention_mask)
        attend = eager_attention
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        kwargs |= {"scaling": self.scaling, "sliding_window": self.sliding_window} | self.sink(query)
        output, weights = attend(self, query, key, value, attention_mask, **kwargs)
        output = output.view(B, T, self.heads, self.head_dim)
        if self.exclusive != "none":
            output = self.without_own_value(output, own)
        if self.o_norm is not None:
            output = self.o_norm(output)
        if self.output_silu:
            output = F.silu(output)
        output = self.o_proj(self.gated("sdpa_output", output, hidden).reshape(B, T, -1))
        return self.gated("dense_output", output[:, :, None, :], hidden)[:, :, 0, :], weights


class SluiceMLP(nn.Module):
    """SwiGLU, or down(relu(up x)^2); with a limit gpt-oss's SwiGLU of clamped gate and up."""

    def __init__(self, config, width, bias=False, limit=None):
        super().__init__()
        C, self.squared, self.limit = config.hidden_size, config.hidden_act == "relu2", limit
        if not self.squared:
            self.gate_proj = linear(C, width, bias)
        self.up_proj = linear(C, width, bias)
        self.down_proj = linear(width, C, bias)

    def forward(self, x):
        up = self.up_proj(x)
        if self.squared:
            return self.down_proj(F.relu(up).square())
        gate = self.gate_proj(x)
        if self.limit is None:
            return self.down_proj(F.silu(gate) * up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down_proj(gate * torch.sigmoid(1.702 * gate) * (up + 1))


class SluiceExperts(nn.ModuleList):
    def __init__(self, config):
        about = (config, config.moe_intermediate_size, config.moe_bias, config.swiglu_limit)
        super().__init__(SluiceMLP(*about) for _ in range(config.num_experts))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """hidden_states (T, C), each token's experts and their weights (T, K)."""
        output = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            token, slot = torch.where(top_k_index == number)
            if token.numel():
                part = expert(hidden_states[token]) * top_k_weights[token, slot, None].to(hidden_states.dtype)
                output = output.index_add(0, token, part)
        return output


class SluiceMoe(nn.Module):
    """A mixture of experts, and a shared expert that every token goes to."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gate = linear(config.hidden_size, config.num_experts, config.moe_bias)
        self.experts = SluiceExperts(config)
        width = config.shared_expert_intermediate_size
        self.shared_expert = SluiceMLP(config, width) if width else None
        gated = width and config.shared_expert_gate
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if gated else None

    def forward(self, hidden):
        x = hidden.reshape(-1, hidden.shape[-1])
        logits = self.gate(x)
        wide = wide_type(logits)
        weights, experts = logits.softmax(-1, dtype=wide).topk(self.config.num_experts_per_tok, -1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        y = self.experts(x, experts, weights)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                shared = shared * torch.sigmoid(self.shared_expert_gate(x))
            y = y + shared
        return y.view_as(hidden)


class SluiceDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        C = config.hidden_size
        sparse = config.num_experts > 0 and (layer_idx + 1) % config.decoder_sparse_step == 0
        self.clip, self.attention_type = config.branch_clip, config.layer_types[layer_idx]
        self.input_layernorm = SluiceGatedNorm(config)
        self.self_attn = SluiceAttention(config, layer_idx)
        self.post_attention_layernorm = SluiceGatedNorm(config)
        is_moe = sparse and layer_idx not in config.mlp_only_layers
        self.mlp = SluiceMoe(config) if is_moe else SluiceMLP(config, config.intermediate_size)
        sandwich = config.norm_placement == "sandwich"
        self.post_attention_branch_layernorm = SluiceRMSNorm(config, C) if sandwich else None
        self.post_mlp_branch_layernorm = SluiceRMSNorm(config, C) if sandwich else None

    def branch(self, x, norm):
        x = x if self.clip is None else x.clamp(-self.clip, self.clip)
        return x if norm is None else norm(x)

    def forward(self, hidden_states, rope=None, attention_mask=None, **kwargs):
        x, mask = hidden_states, attention_mask[self.attention_type]
        attended, _ = self.self_attn(self.input_layernorm(x), rope, mask, **kwargs)
        x = x + self.branch(attended, self.post_attention_branch_layernorm)
        return x + self.branch(self.mlp(self.post_attention_layernorm(x)), self.post_mlp_branch_layernorm)


class SluicePreTrainedModel(PreTrainedModel):
    config_class = SluiceConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules, _skip_keys_device_placement = ["SluiceDecoderLayer"], ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config, *args, **kwargs):
        if config.attention["kind"] != "softmax":
            # Only eager_attention knows sinks, keys beside those of tokens, softpick, and keys selected by a mask.
            self._supports_sdpa = self._supports_flash_attn = self._supports_flex_attn = False
            if getattr(config, "_attn_implementation_internal", None) in (None, "sdpa"):
                config._attn_implementation = "eager"
        super().__init__(config, *args, **kwargs)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)


class SluiceModel(SluicePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_norm = SluiceRMSNorm(config, config.hidden_size) if config.embedding_norm else None
        self.layers = nn.ModuleList(SluiceDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = SluiceRMSNorm(config, config.hidden_size)
        self.rotary_emb = SluiceRotaryEmbedding(config, config.head_dim)
        indexer = (config.attention.get("sparse") or {}).get("indexer", {"rope": False})
        self.index_rotary_emb = SluiceRotaryEmbedding(config, indexer["head_dim"]) if indexer["rope"] else None
        self.gradient_checkpointing = False
        self.post_init()

    # fmt: off
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                inputs_embeds=None, use_cache=None, output_hidden_states=None, cache=None, **kwargs):  # fmt: on
        past_key_values = cache if past_key_values is None else past_key_values
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device)[None]
        about = {"config": self.config, "inputs_embeds": x, "attention_mask": attention_mask}
        about |= {CACHE: past_key_values, "position_ids": position_ids}
        make = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        masks = {kind: make[kind](**about) for kind in sorted(set(self.config.layer_types))}
        rope, states = self.rotary_emb(x, position_ids), []
        if self.index_rotary_emb is not None:
            kwargs["index_rope"] = self.index_rotary_emb(x, position_ids)
        for layer in self.layers:
            states.append(x)
            x = layer(x, rope=rope, attention_mask=masks, past_key_values=past_key_values, **kwargs)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*states, x) if output_hidden_states else None,
            **{CACHE: past_key_values if use_cache else None},
        )


class SluiceForCausalLM(SluicePreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = SluiceModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
        kwargs.pop("return_dict", None)
        outputs = self.model(input_ids=input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        cap = self.config.final_logit_softcapping
        if cap is not None:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            logits = cap * torch.tanh(wide / cap)
        loss = None
        if labels is not None:
            wide = logits[:, :-1].float().flatten(0, 1)
            loss = F.cross_entropy(wide, labels[:, 1:].flatten(), ignore_index=-100)
        rest = {CACHE: getattr(outputs, CACHE), "hidden_states": outputs.hidden_states}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **rest)
