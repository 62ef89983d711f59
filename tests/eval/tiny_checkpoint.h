#pragma once
#include <algorithm>

#include "checkpoint/store.h"
#include "config/load.h"
#include "support/tiny_training.h"

namespace sluice::test {

/// A run folder with a checkpoint of a short training, with at least the byte tokenizer's
/// vocabulary.
inline std::string trained_checkpoint(TinyTraining& t, int64_t steps) {
  t.config.model.vocab_size = std::max<int64_t>(t.config.model.vocab_size, 257);
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  for (int64_t i = 0; i < steps; ++i) trainer.step();
  CheckpointContent content = trainer.content();
  content.config_yaml = to_yaml(t.config);
  CheckpointStore store(t.folder / "run/ckpt", t.config.checkpoint, content);
  store.save(content);
  REQUIRE(store.wait());
  return t.folder / "run";
}

}  // namespace sluice::test
