#include "run/init_source.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/manifest.h"
#include "checkpoint/store.h"
#include "config/derived.h"
#include "config/model_function.h"
#include "core/io.h"
#include "core/strict_json.h"
#include "data/bpe.h"
#include "data/sentencepiece.h"
#include "eval/trained_model.h"
#include "hf/config.h"
#include "hf/folder_tokenizer.h"
#include "hf/layouts.h"
#include "hf/open.h"
#include "train/fresh_start.h"

namespace sluice {
namespace {

constexpr size_t kShownValue = 200;

class Comparison {
 public:
  Comparison(const Config& config, const KeyPlaces& places) : config_(config), places_(places) {}

  bool accepts(std::string_view key) const {
    const auto& names = config_.train.init_ignore;
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return names_key(name, key); });
  }
  /// "configs/a.yaml:4:9", or a text that the key is not given.
  std::string place(const std::string& key) const {
    const auto found = places_.find(key);
    return found == places_.end() ? "by default" : found->second;
  }
  /// `source`: the place of its value.
  void differ(const FunctionDifference& d, const std::string& source) {
    add(d.key,
        fmt::format("{}: {} = {}, but {} is {}", place(d.key), d.key, printable(d.here, kShownValue), source,
                    printable(d.source, kShownValue)),
        fmt::format("{}: {} -> {}", d.key, printable(d.source, kShownValue), printable(d.here, kShownValue)));
  }
  /// All differences of two models. Those that fresh parameters make up for are accepted where they are
  /// asked for, and otherwise the message says how.
  template <class Place>
  void compare_models(const ModelConfig& source, const Place& place_of) {
    const ModelConfig here = model_after(config_.model, 0);
    const bool fresh = config_.train.init_missing == InitMissing::fresh;
    const ModelConfig from = grown(source, here);
    const std::vector<FunctionDifference> added = function_differences(source, from);
    for (const FunctionDifference& d : added)
      if (fresh) accepted_.push_back(fmt::format("{}: {} -> {}, new parameters", d.key, d.source, d.here));
    can_grow_ = !fresh && !added.empty();
    for (const FunctionDifference& d : function_differences(fresh ? from : source, here))
      differ(d, place_of(d.key));
  }
  /// What YaRN stretches are the positions of the source; the key's default is another model's length.
  void require_original_length(const std::string& source, int64_t positions) const {
    const std::string key = "model.rope.scaling.original_max_position_embeddings";
    const RopeScalingConfig& scaling = config_.model.rope.scaling;
    if (scaling.type != RopeScalingType::yarn || places_.count(key) > 0 ||
        scaling.original_max_position_embeddings == positions)
      return;
    fail(
        ExitCode::usage,
        "{}: train.init_from: {} was trained with {} positions, and {} is {} by default; set it to what YaRN "
        "stretches",
        place("model.rope.scaling.type"), source, positions, key, scaling.original_max_position_embeddings);
  }
  /// accepted_by empty: train.init_ignore cannot accept it.
  void add(const std::string& accepted_by, const std::string& line, const std::string& when_accepted) {
    if (!accepted_by.empty() && accepts(accepted_by)) {
      accepted_.push_back(when_accepted);
      return;
    }
    lines_ += "\n  " + line;
    (accepted_by.empty() ? hopeless_ : names_).push_back(short_name(accepted_by));
  }
  /// Throws if unaccepted differences remain; otherwise returns the accepted ones.
  std::vector<std::string> conclude(const std::string& source) {
    if (lines_.empty()) return std::move(accepted_);
    std::string message = fmt::format(
        "{}: train.init_from: the weights of {} were trained for another function than this configuration "
        "computes:{}",
        place("train.init_from"), source, lines_);
    names_.erase(std::unique(names_.begin(), names_.end()), names_.end());
    if (!hopeless_.empty()) {
      message += "\nThese weights cannot be used by this version.";
    } else {
      message += fmt::format(
          "\nSet these keys to what the weights were trained with, or accept the difference: "
          "train.init_ignore: [{}]",
          fmt::join(names_, ", "));
      if (can_grow_)
        message += "\nNew gates and sinks can start so that the function is kept: train.init_missing: fresh";
    }
    throw Error(ExitCode::usage, message);
  }

 private:
  /// The text for a group of related keys.
  static std::string short_name(const std::string& key) {
    for (const char* section :
         {"model.rope.scaling", "model.attention.gates", "model.attention.switch_heads"})
      if (names_key(section, key)) return section;
    return key;
  }

  const Config& config_;
  const KeyPlaces& places_;
  bool can_grow_ = false;
  std::string lines_;
  std::vector<std::string> names_, hopeless_, accepted_;
};

void compare_tokenizers(const std::string& source, const std::string& theirs, const Tokenizer& tokenizer,
                        Comparison& comparison) {
  const std::string ours = tokenizer.fingerprint();
  if (theirs == ours) return;
  comparison.add(kIgnoreTokenizer,
                 fmt::format("{}: {}: the tokenizer's fingerprint is {}, but that of {} is {}",
                             comparison.place(kIgnoreTokenizer), kIgnoreTokenizer, ours, source,
                             printable(theirs, kShownValue)),
                 fmt::format("{}: {} -> {}", kIgnoreTokenizer, printable(theirs, kShownValue), ours));
}

void refuse_adapters(const std::string& path, int64_t rank) {
  if (rank > 0)
    fail(ExitCode::usage,
         "train.init_from: {} contains adapters (lora.rank = {}) beside the weights; merge them first: "
         "sluice checkpoint merge {} -o FOLDER, then give FOLDER",
         path, rank, path);
}

void compare_checkpoint(const CheckpointInfo& checkpoint, const Tokenizer& tokenizer, Comparison& comparison,
                        InitSource& out) {
  const Config source = checkpoint_config(checkpoint, "auto");
  refuse_adapters(checkpoint.path, source.lora.rank);
  const std::string file = checkpoint.path + "/config.yaml";
  if (source.model.rope.scaling.type == RopeScalingType::none)
    comparison.require_original_length(checkpoint.path, max_positions(source));
  comparison.compare_models(source.model, [&](const std::string&) { return "that of " + file; });
  out.seed = source.train.seed;
  if (const auto data = checkpoint.state.find("data_fingerprint");
      data != checkpoint.state.end() && data->is_string())
    out.data = data->get<std::string>();
  const auto found = checkpoint.state.find("tokenizer_fingerprint");
  if (found == checkpoint.state.end() || !found->is_string())
    out.tokenizer = "the checkpoint does not name its tokenizer";
  else
    compare_tokenizers(checkpoint.path, found->get<std::string>(), tokenizer, comparison);
}

/// "rope_theta in FOLDER/config.json", or the origin of the default.
std::string where_in(const HfModel& source, const std::string& key, const std::string& file) {
  const auto found = source.spelled.find(key);
  if (found != source.spelled.end() && found->second.given)
    return fmt::format("{} in {}", found->second.key, file);
  const std::string absent =
      found == source.spelled.end() ? "" : fmt::format(", without {},", found->second.key);
  return fmt::format("that of model_type {} in {}{}", source.model_type, file, absent);
}

void compare_config_json(const std::string& file, Comparison& comparison, InitSource& out) {
  const HfModel source = read_hf_config(file);
  out.model_type = source.model_type;
  refuse_adapters(out.path, source.lora_rank);
  if (source.model.rope.scaling.type == RopeScalingType::none && source.model.max_position_embeddings)
    comparison.require_original_length(out.path, *source.model.max_position_embeddings);
  comparison.compare_models(source.model,
                            [&](const std::string& key) { return where_in(source, key, file); });
  out.format = source.format;
  for (const HfModel::Unsupported& u : source.unsupported)
    comparison.add(u.accepted_by, fmt::format("{}: {} has no counterpart here", file, u.what),
                   u.what + " is left out");
}

/// A tokenizer's file beside the weights is taken as the tokenizer that they were trained with: that of this
/// run's kind where there are both.
void compare_folder_tokenizer(const std::string& folder, const Tokenizer& tokenizer, Comparison& comparison,
                              InitSource& out) {
  const std::string model = folder + "/" + kTokenizerFile, json = folder + "/" + kBpeTokenizerFile;
  const bool mine_is_json = tokenizer_file(tokenizer.model()) == std::string(kBpeTokenizerFile);
  const bool takes_json = io::exists(json) && (mine_is_json || !io::exists(model));
  const std::string path = takes_json ? json : model;
  out.tokenizer = "the tokenizer of the folder is unknown";
  if (!io::exists(path)) return;
  if (takes_json && tokenizer.fingerprint().starts_with("byte:") && is_of_bytes(folder))
    return out.tokenizer.clear();
  std::string theirs;
  try {
    theirs = (takes_json ? make_bpe_tokenizer(path) : make_sentencepiece_tokenizer(path))->fingerprint();
  } catch (const Error&) {
    return;  // another format under the same name
  }
  out.tokenizer.clear();
  compare_tokenizers(path, theirs, tokenizer, comparison);
}

std::string hash_of_files(const std::vector<std::string>& paths) {
  Checksum all;
  for (const std::string& path : paths) {
    const io::MappedFile file(path);
    all.update(file.data(), file.size());
  }
  return all.hex();
}

std::vector<std::string> weight_files(const std::string& path) {
  if (!io::is_directory(path)) return {path};
  std::vector<std::string> files;
  for (const std::string& name : io::list_directory(path))
    if (is_shard_of(name, kWeightsKind)) files.push_back(path + "/" + name);
  return files;
}

CheckpointInfo newest_of(const std::string& path, Communicator* ranks) {
  const std::string folder = io::is_directory(path + "/ckpt") ? path + "/ckpt" : path;
  CheckpointInfo newest = newest_valid_checkpoint(folder, ranks);
  if (newest.path.empty())
    fail(ExitCode::data,
         "train.init_from: {} is neither a checkpoint, a run with checkpoints, nor a folder with {} or {}",
         path, shard_name(kWeightsKind, 0, 1), kWeightsIndex);
  return newest;
}

}  // namespace

std::string InitSource::text() const {
  std::string details = kind;
  if (!model_type.empty()) details += " " + model_type;
  if (step >= 0) details += fmt::format(", step {}", step);
  if (!fingerprint.empty()) details += ", hash " + fingerprint.substr(0, 16);
  std::string text = fmt::format("{} ({})", path, details);
  if (!tokenizer.empty()) text += "; tokenizer not compared: " + tokenizer;
  if (!accepted.empty()) text += fmt::format("; accepted: {}", fmt::join(accepted, ", "));
  return text;
}

nlohmann::ordered_json InitSource::json() const {
  nlohmann::ordered_json j = {{"path", path}, {"kind", kind}};
  if (step >= 0) j["step"] = step;
  if (!model_type.empty()) j["model_type"] = model_type;
  if (!fingerprint.empty()) j["fingerprint"] = fingerprint;
  j["tokenizer"] = tokenizer.empty() ? "equal" : tokenizer;
  j["accepted"] = accepted;
  return j;
}

InitSource find_init_source(const Config& config, const KeyPlaces& places, const Tokenizer& tokenizer,
                            Communicator* ranks) {
  const std::string& path = config.train.init_from;
  InitSource out;
  if (path.empty()) return out;
  if (!io::exists(path)) fail(ExitCode::no_input, "train.init_from: there is no {}", path);
  if (!io::is_directory(path) && (path.ends_with(".yaml") || path.ends_with(".yml")))
    fail(ExitCode::usage,
         "{}: train.init_from: {} is a configuration, which holds no weights; give a run, a checkpoint or a "
         "folder with {}",
         places.count("train.init_from") ? places.at("train.init_from") : "configuration", path,
         shard_name(kWeightsKind, 0, 1));
  Comparison comparison(config, places);
  const bool hashes = !ranks || ranks->rank() == 0;
  const bool folder = io::is_directory(path), checkpoint = folder && io::exists(path + "/" + kManifestName);
  if (checkpoint || (folder && !holds_model(path))) {
    const CheckpointInfo source = checkpoint ? verify_checkpoint(path, ranks) : newest_of(path, ranks);
    out.path = source.path;
    out.kind = "checkpoint";
    out.step = source.step;
    compare_checkpoint(source, tokenizer, comparison, out);
    if (hashes) out.fingerprint = hash_of_files({source.path + "/" + kManifestName});
  } else {
    out.path = path;
    out.kind = "Hugging Face";
    const std::string beside = folder ? path : std::filesystem::path(path).parent_path().string();
    const std::string file = (beside.empty() ? "." : beside) + "/config.json";
    if (io::exists(file)) {
      compare_config_json(file, comparison, out);
    } else if (comparison.accepts("model")) {
      out.kind = "weights without a configuration";
    } else {
      fail(ExitCode::data,
           "{}: train.init_from: there is no {}, so the function that the weights of {} were trained for is "
           "unknown; "
           "put it "
           "there, or accept any function: train.init_ignore: [model]",
           comparison.place("train.init_from"), file, path);
    }
    compare_folder_tokenizer(beside.empty() ? "." : beside, tokenizer, comparison, out);
    if (hashes) out.fingerprint = hash_of_files(weight_files(path));
  }
  out.accepted = comparison.conclude(out.path);
  out.map = weight_map(out.format, config.model);
  return out;
}

}  // namespace sluice
