#include "hf/export_model.h"

#include <spdlog/fmt/fmt.h>

#include <map>
#include <memory>
#include <optional>

#include "checkpoint/manifest.h"
#include "core/io.h"
#include "eval/portable.h"
#include "eval/trained_model.h"
#include "hf/config.h"
#include "hf/export.h"
#include "hf/holds.h"
#include "hf/layouts.h"
#include "hf/model_card.h"
#include "hf/python_files.h"
#include "hf/tokenizer_files.h"
#include "hf/write_weights.h"

namespace sluice {
namespace {

constexpr HfFormat kAutomatic[] = {HfFormat::qwen3,      HfFormat::llama,   HfFormat::qwen3_moe,
                                   HfFormat::qwen3_next, HfFormat::gpt_oss, HfFormat::sluice};

std::string name_of(HfFormat format) {
  return std::string(EnumNames<HfFormat>::names[static_cast<size_t>(format)]);
}

HfFormat choose(const Config& config, const std::optional<HfFormat>& wanted) {
  std::vector<std::string> reasons;
  if (wanted) {
    reasons = not_held(config, *wanted);
    if (reasons.empty()) return *wanted;
  } else {
    for (const HfFormat format : kAutomatic)
      if (reasons = not_held(config, format); reasons.empty()) return format;
  }
  fail(ExitCode::usage, "the format {} cannot hold this model:\n  {}",
       name_of(wanted.value_or(HfFormat::sluice)), fmt::join(reasons, "\n  "));
}

nlohmann::json generation_config(const Config& config, std::optional<int32_t> end_of_document) {
  return {{"_from_model_config", false},
          {"eos_token_id", hf_token(end_of_document)},
          {"bos_token_id", hf_token(config.data.begin_token)}};
}

/// With what transformers needs to find the code beside the weights, and the type of the weights.
nlohmann::json exported_config(const Config& config, std::optional<int32_t> end_of_document, HfFormat format,
                               const std::string& dtype) {
  nlohmann::json j = hf_config(config, end_of_document, format);
  if (!dtype.empty()) j["torch_dtype"] = dtype == "BF16" ? "bfloat16" : "float32";
  if (format == HfFormat::sluice)
    j["auto_map"] = {{"AutoConfig", "configuration_sluice.SluiceConfig"},
                     {"AutoModel", "modeling_sluice.SluiceModel"},
                     {"AutoModelForCausalLM", "modeling_sluice.SluiceForCausalLM"}};
  return j;
}

}  // namespace

Exported export_model(const CheckpointInfo& checkpoint, const std::string& folder,
                      const ExportOptions& options) {
  const Config config = checkpoint_config(checkpoint, "auto");
  Exported out;
  out.format = choose(config, options.format);
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    tokenizer = checkpoint_tokenizer(checkpoint, config.data.tokenizer, options.tokenizer);
  } catch (const Error& error) {
    if (!options.tokenizer.empty() || error.code() != ExitCode::no_input) throw;
    out.warnings.push_back(fmt::format("exported without a tokenizer: {}", error.what()));
  }
  std::map<std::string, std::string> files;
  std::optional<int32_t> end;
  if (tokenizer) {
    end = tokenizer->end_of_document();
    files = tokenizer_files(*tokenizer, config);
  } else if (const std::string own = checkpoint.path + "/config.json"; io::exists(own)) {
    if (const std::optional<int64_t> token = read_hf_config(own).end_token)
      end = static_cast<int32_t>(*token);
  }
  files["config.json"] = exported_config(config, end, out.format, options.dtype).dump(2) + "\n";
  files["generation_config.json"] = generation_config(config, end).dump(2) + "\n";
  files["README.md"] =
      model_card(checkpoint, config, out.format, tokenizer && puts_begin_token(*tokenizer, config));
  if (out.format == HfFormat::sluice)
    for (const PythonFile& file : kPythonFiles) files[file.name] = file.text;

  const std::string weights = shard_name(kWeightsKind, 0, 1);
  out.files = {weights};
  for (const auto& [name, text] : files) out.files.push_back(name);
  NewFolderContent content(folder, out.files);
  const Manifest manifest = read_manifest(checkpoint.path);
  write_weights(checkpoint.path, manifest, weight_map(out.format, config.model), options.dtype,
                content.add(weights));
  for (const auto& [name, text] : files) content.add(name, text);
  content.publish();
  return out;
}

}  // namespace sluice
