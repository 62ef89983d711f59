#pragma once
#include <string>

#include "checkpoint/store.h"
#include "hf/config.h"

namespace sluice {

/// README.md of an exported folder: what the model is, how it is loaded, and the results of the run's last
/// validation at this step (RUN/eval.jsonl), if there is one. tokenizer_begins: the exported tokenizer puts
/// data.begin_token in front of a text.
std::string model_card(const CheckpointInfo& checkpoint, const Config& config, HfFormat format,
                       bool tokenizer_begins);

}  // namespace sluice
