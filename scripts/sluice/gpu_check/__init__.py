"""Parts of scripts/gpu_check: a comparison of losses on the CPU and the GPU, and the table of results."""
