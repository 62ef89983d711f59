"""Expected results for tests/golden, computed by PyTorch and transformers. Needs torch."""
