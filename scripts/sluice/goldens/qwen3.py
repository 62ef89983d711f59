"""Writes tests/golden/qwen3_tiny: a Qwen3 of random weights as transformers saves it, with logits of a few tokens.

Needs torch, transformers and safetensors. Run again only when the golden is to change; the result is committed.
"""

from __future__ import annotations

import sys

from .tiny_qwen3 import SIZES, change_norm, some_tokens, torch, transformers, write_folder


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            change_norm(parameter)
        tokens = some_tokens()
        logits = model(tokens).logits[0]
    write_folder("qwen3_tiny", model, tokens, logits)
