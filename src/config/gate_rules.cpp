#include "config/gate_rules.h"

namespace sluice {
namespace {

void check_position(const GateConfig& gate, const std::string& key, Checks& check) {
  if (gate.position != GatePosition::dense_output) return;
  check.require(gate.granularity == GateGranularity::elementwise, {key + ".granularity", key + ".position"},
                key + ": dense_output comes after the heads are joined; granularity must be elementwise");
  check.require(gate.heads == GateSharing::specific, {key + ".heads", key + ".position"},
                key + ": dense_output comes after the heads are joined; heads must be specific");
}

/// What the scores are computed from, and the start of the projection.
void check_projection(const GateConfig& gate, const std::string& key, int64_t hidden_size, Checks& check) {
  const std::string channels = key + ".input_channels", input = key + ".input";
  check.size(channels, gate.input_channels, 0);
  if (gate.input_channels > 0) {
    check.require(
        gate.input == GateInput::hidden, {channels, input},
        channels + " selects channels of the hidden state; it has no effect unless input is hidden");
    check.require(gate.input_channels <= hidden_size || hidden_size < 1, {channels, "model.hidden_size"},
                  fmt::format("{} = {} is more than model.hidden_size = {}", channels, gate.input_channels,
                              hidden_size));
  }
  if (gate.input != GateInput::none) return;
  check.require(gate.init == GateInit::matrix, {key + ".init", input},
                key + ".init has no effect while input is none: a learned constant always starts at 0");
  check.require(!gate.bias, {key + ".bias", input},
                key + ".bias has no effect while input is none: a learned constant is a bias itself");
}

void check_gated_norm(const ModelConfig& m, Checks& check) {
  const std::string rank = "model.gated_norm.rank";
  check.size(rank, m.gated_norm.rank, 0);
  check.require(m.gated_norm.rank <= m.hidden_size || m.hidden_size < 1, {rank, "model.hidden_size"},
                fmt::format("{} = {} is more than model.hidden_size = {}, so it is not a low rank", rank,
                            m.gated_norm.rank, m.hidden_size));
  check.require(m.gated_norm.rank != 0 || m.gated_norm.init == GateInit::matrix,
                {"model.gated_norm.init", rank}, "model.gated_norm.init has no effect while rank is 0");
}

}  // namespace

void check_gates(const ModelConfig& m, Checks& check) {
  for (size_t i = 0; i < m.attention.gates.size(); ++i) {
    const std::string key = fmt::format("model.attention.gates[{}]", i);
    check_position(m.attention.gates[i], key, check);
    check_projection(m.attention.gates[i], key, m.hidden_size, check);
  }
  check_gated_norm(m, check);
}

}  // namespace sluice
