"""Configuration of the models that Sluice exports (model_type "sluice")."""

try:  # transformers 5
    from transformers.configuration_utils import PreTrainedConfig
except ImportError:
    from transformers.configuration_utils import PretrainedConfig as PreTrainedConfig


class SluiceConfig(PreTrainedConfig):
    """The keys of Sluice's `model` section, with Hugging Face's names where they have one.

    attention: kind (softmax, sink, off_by_one, sink_key, kv_bias, softpick, sparse), sparse (scope, block,
    indexer, k and more), window, window_pattern, gates (a list of position, granularity, heads, combine,
    activation, input, input_channels, bias), exclusive, output_norm, output_activation, switch_heads.
    rope_parameters: rope_type (default or yarn), rope_theta, and YaRN's factor,
    original_max_position_embeddings, beta_fast, beta_slow, attention_factor, truncate; the older keys
    rope_theta and rope_scaling are read as well. attention_bias: of the four projections of attention;
    moe_bias: of the router and the experts; swiglu_limit: of the experts' SwiGLU, gpt-oss's where it is given.
    """

    model_type = "sluice"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    def __init__(
        self,
        vocab_size=257,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
        initializer_range=0.02,
        use_cache=True,
        rope_theta=10000.0,
        rope_scaling=None,
        rope_parameters=None,
        qk_norm=True,
        qk_norm_order="before_rope",
        norm_placement="pre",
        norm_weights=True,
        branch_clip=None,
        embedding_norm=False,
        final_logit_softcapping=None,
        gated_norm=None,
        attention_bias=False,
        attention=None,
        num_experts=0,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=None,
        shared_expert_intermediate_size=0,
        shared_expert_gate=False,
        moe_bias=False,
        swiglu_limit=None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.qk_norm = qk_norm
        self.qk_norm_order = qk_norm_order
        self.norm_placement = norm_placement
        self.norm_weights = norm_weights
        self.branch_clip = branch_clip
        self.embedding_norm = embedding_norm
        self.final_logit_softcapping = final_logit_softcapping
        self.gated_norm = {"rank": 0, **(gated_norm or {})}
        self.attention = {
            "kind": "softmax",
            "window": 0,
            "window_pattern": 0,
            "gates": [],
            "exclusive": "none",
            "output_norm": "none",
            "output_activation": "none",
            **(attention or {}),
        }
        self.attention_bias = attention_bias
        window, pattern = self.attention["window"], self.attention["window_pattern"]
        self.sliding_window = window or None  # as transformers' masks and caches read it
        self.layer_types = [
            "sliding_attention" if window and not (pattern and (i + 1) % pattern == 0) else "full_attention"
            for i in range(num_hidden_layers)
        ]
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size
        self.norm_topk_prob = norm_topk_prob
        self.decoder_sparse_step = decoder_sparse_step
        self.mlp_only_layers = mlp_only_layers or []
        self.shared_expert_intermediate_size = shared_expert_intermediate_size
        self.shared_expert_gate = shared_expert_gate
        self.moe_bias = moe_bias
        self.swiglu_limit = swiglu_limit
        rope = {"rope_type": "default", "rope_theta": rope_theta}
        rope.update({k: v for k, v in (rope_scaling or {}).items() if k != "type"})
        rope.update(rope_parameters or {})
        self.rope_parameters = rope
        for derived in ("sliding_window", "layer_types"):
            kwargs.pop(derived, None)
        super().__init__(**kwargs)
        self.rope_parameters = rope
