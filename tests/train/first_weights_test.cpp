// The first weights of a training that starts from another one's (train.init_from).
#include <spdlog/fmt/fmt.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "comm/threads.h"
#include "core/parallel_for.h"
#include "support/model.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;

namespace {

std::vector<float> floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// All first tensors of a training on so many ranks.
std::map<std::string, std::string> first_bits(const Config& config, const TinyTraining& t, int ranks) {
  WholeState state;
  run_thread_ranks(ranks, [&](Communicator& c) {
    set_num_threads(1);
    const Blend data = t.blend();
    Trainer trainer(config, data, &c);
    trainer.initialize();
    state.add(trainer.content());
  });
  return state.tensors();
}

}  // namespace

TEST_CASE("master weights of bf16 begin with every digit of the f32 weights that they start from",
          "[first_weights]") {
  const OneThread one_thread;
  TinyTraining source(Precision::f32);
  source.config.model.vocab_size = 257;  // of the tokenizer that a checkpoint's configuration names
  source.config.model.attention.gates.clear();
  const Blend data = source.blend();
  Trainer trainer(source.config, data);
  trainer.initialize();
  trainer.step();
  const std::map<std::string, std::string> wide = bits_of(trainer);

  TinyTraining t(Precision::bf16);
  t.config.model = source.config.model;
  t.config.model.attention.gates = {GateConfig{.activation = GateActivation::sigmoid}};
  t.config.train.init_from = save_checkpoint(source.folder / "source", trainer, source.config);
  t.config.train.init_missing = InitMissing::fresh;
  t.config.parallel.timeout_seconds = 60;
  for (const auto& [ranks, stage] : {std::pair{1, 0}, {2, 0}, {2, 1}, {2, 3}}) {
    t.config.parallel.zero_stage = stage;
    const std::map<std::string, std::string> narrow = first_bits(t.config, t, ranks);
    int compared = 0;
    for (const auto& [name, bytes] : wide) {
      if (name.ends_with(".m") || name.ends_with(".v")) continue;
      INFO(name << " on " << ranks << " ranks with zero_stage " << stage);
      // A new sigmoid gate halves what the output projection reads.
      const float factor = name.ends_with("o_proj.weight") ? 2 : 1;
      std::vector<float> expected = floats(bytes);
      std::string rounded;
      for (float& x : expected) {
        x *= factor;
        const bf16 value(x);
        rounded.append(reinterpret_cast<const char*>(&value), sizeof value);
      }
      CHECK((floats(narrow.at(name + kMasterSuffix)) == expected));
      CHECK((narrow.at(name) == rounded));
      ++compared;
    }
    CHECK(3 * compared == std::ssize(wide));  // and two moments of each
    const std::string gate = fmt::format("model.layers.0.self_attn.gate_proj.weight{}", kMasterSuffix);
    // The new gate has no source: its master weights are what its weights are.
    CHECK((floats(narrow.at(gate)) == std::vector<float>(32 * 32)));
  }
}
