#pragma once
// A tiny training of documents that end anywhere, for tests of sequences that several ranks share.
#include <random>

#include "support/tiny_training.h"

namespace sluice::test {

/// Ragged documents, many of one token, which end anywhere within the chunks of a sample.
struct RaggedTraining : TinyTraining {
  explicit RaggedTraining(Precision precision = Precision::f64) : TinyTraining(precision) {
    std::mt19937 random(3);
    std::vector<std::vector<int32_t>> documents;
    for (int d = 0; d < 400; ++d) {
      const auto length = d % 3 == 0 ? 1 : 1 + random() % 30;
      auto& document = documents.emplace_back();
      uint32_t x = random() % 31;
      for (size_t i = 0; i < length; ++i, x = (x * 5 + 3 + random() % 2) % 31)
        document.push_back(static_cast<int32_t>(x));
    }
    write_tokens(folder / "ragged", documents, 32);
    config.data.train = {{"ragged", folder / "ragged", 1.0}};
    config.data.validation.clear();
    config.data.document_mask = true;
    config.train.global_batch_size = 4;
    config.train.micro_batch_size = 2;
  }
};

/// With documents longer than a query's number of keys.
inline void use_sparse_attention(Config& config) {
  config.model.attention.kind = AttentionKind::sparse;
  SparseConfig& s = config.model.attention.sparse;
  s.indexer.heads = 2;
  s.indexer.head_dim = 8;
  s.indexer.rope = true;  // equal tokens would tie in the first layer, but for rounding
  s.k = {.policy = BudgetPolicy::inverse, .base = 5, .min = 2, .max = 8};
  s.loss.temperature = 3;
  s.loss.learn_temperature = true;
}

}  // namespace sluice::test
