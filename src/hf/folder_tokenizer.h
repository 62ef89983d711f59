#pragma once
// The tokenizer of a Hugging Face folder: which of its files it is, with which token documents end, and which
// one stands in front of a text.
#include <optional>
#include <string>

#include "config/config.h"
#include "hf/config.h"

namespace sluice {

/// Whether the folder's tokenizer_config.json says that its tokens are bytes; only exports of Sluice do.
bool is_of_bytes(const std::string& folder);

/// Empty where the folder has no tokenizer that Sluice reads (tokenizer.model, original_tokenizer.json of an
/// export, tokenizer.json). Documents end
/// with the model's eos_token_id, if that is a token of its own in tokenizer.json. Error(data) for damaged
/// files.
std::optional<TokenizerConfig> folder_tokenizer(const std::string& folder, const HfModel& model);

/// The token in front of each text (data.begin_token): what config.json states, if Sluice has written it.
/// Otherwise its bos_token_id where tokenizer_config.json has add_bos_token: true, and nothing where it has
/// false; without that key, the special token with which the template in tokenizer.json's post_processor
/// begins.
std::optional<int64_t> folder_begin_token(const std::string& folder, const HfModel& model);

}  // namespace sluice
