#pragma once
// SentencePiece models for tests.
#include <sentencepiece_trainer.h>
#include <spdlog/fmt/fmt.h>

#include "data/temporary.h"

namespace sluice::test {

/// A small model trained on the spot.
inline std::string train_model(const TemporaryFolder& folder, const std::string& name,
                               const std::string& more = "") {
  std::string text;
  for (int i = 0; i < 400; ++i) {
    text +=
        fmt::format("In the beginning was word {}, and the word was gated by head {}.\n", i * 7 % 97, i % 12);
    text += fmt::format("A sink of attention at token {} drains {} layers of their mass.\n", i % 31, i % 5);
  }
  write_bytes(folder / "corpus.txt", text);
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      fmt::format("--input={} --model_prefix={} --model_type=bpe --vocab_size=400 --byte_fallback=true "
                  "--minloglevel=2 {}",
                  folder / "corpus.txt", folder / name, more));
  REQUIRE(status.ok());
  return folder / (name + ".model");
}

}  // namespace sluice::test
