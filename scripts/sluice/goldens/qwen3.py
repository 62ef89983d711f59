"""Writes tests/golden/qwen3_tiny: a Qwen3 of random weights as transformers saves it, with logits of a few tokens.

Needs torch, transformers and safetensors. Run again only when the golden is to change; the result is committed.
"""

from __future__ import annotations

import json
import pathlib
import sys

from .. import program

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"make_goldens_qwen3: {error}; run this with a Python that has it: {sys.executable} does not")

FOLDER = pathlib.Path(program.ROOT) / "tests" / "golden" / "qwen3_tiny"


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
        initializer_range=0.2,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms start at one; change them so that they have an effect
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        ids = torch.randint(0, 32, (1, 12))
        logits = model(ids).logits[0]
        # The same arithmetic in f64 shows how far f32 rounding reaches.
        logits_f64 = model.double()(ids).logits[0]
    model.float().save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    golden = {
        "input_ids": ids[0].tolist(),
        "logits_f64": logits_f64.tolist(),
        "f32_error": (logits.double() - logits_f64).abs().max().item(),
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
    }
    (FOLDER / "logits.json").write_text(json.dumps(golden) + "\n")
