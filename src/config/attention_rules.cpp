#include "config/attention_rules.h"

namespace sluice {

void check_attention(const ModelConfig& m, Checks& check) {
  const AttentionConfig& a = m.attention;
  const std::string window = "model.attention.window", pattern = "model.attention.window_pattern",
                    kernel = "model.attention.kernel";
  check.size(window, a.window, 0);
  check.size(pattern, a.window_pattern, 0);
  check.require(a.window_pattern <= 0 || a.window != 0, {pattern, window},
                pattern + " has no effect while window is 0");
  check.require(a.window_pattern != 1, {pattern},
                pattern + " = 1 leaves no layer with a window; use window: 0, or 2 for every other layer");
  check.require(a.window_pattern <= 1 || m.num_hidden_layers < 1 || a.window_pattern <= m.num_hidden_layers,
                {pattern, "model.num_hidden_layers"},
                fmt::format("{} = {} is more than the {} layers, so that all have the window; use 0", pattern,
                            a.window_pattern, m.num_hidden_layers));
  check.require(a.kind != AttentionKind::softpick || a.kernel == AttentionKernel::automatic,
                {kernel, "model.attention.kind"},
                kernel + " names a kernel of softmax attention; softpick has one kernel: use auto");
  check.require(
      a.kind != AttentionKind::sparse || a.kernel == AttentionKernel::automatic,
      {kernel, "model.attention.kind"},
      kernel + " names a kernel of attention over all keys; sparse attention has its own: use auto");
  check.require(a.window <= 0 || a.kernel != AttentionKernel::cudnn, {kernel, window},
                kernel + ": cudnn has no sliding window; use auto, or window: 0");
}

}  // namespace sluice
