#include "config/validate.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "config/model_rules.h"
#include "config/sparse_rules.h"
#include "config/task_rules.h"
#include "config/training_rules.h"
#include "core/device.h"
#include "core/error.h"

namespace sluice {
namespace {

void check_sources(const std::vector<DataSource>& sources, const std::string& list, Checks& check) {
  std::set<std::string> names;
  for (size_t i = 0; i < sources.size(); ++i) {
    const DataSource& source = sources[i];
    const std::string key = fmt::format("{}[{}]", list, i);
    check.require(!source.name.empty(), {key + ".name", key}, key + " needs a name");
    check.require(source.name.empty() || names.insert(source.name).second, {key + ".name"},
                  fmt::format("{}.name: {} is used twice in {}", key, source.name, list));
    check.require(source.name.find_first_of("/\\\n\t ") == std::string::npos, {key + ".name"},
                  fmt::format("{}.name must not contain slashes or spaces, got \"{}\"", key, source.name));
    check.require(!source.path.empty(), {key + ".path", key}, key + " needs a path");
    check.positive(key + ".weight", source.weight);
  }
}

void check_data(const DataConfig& d, Checks& check) {
  check.require(d.tokenizer.type != TokenizerType::sentencepiece || !d.tokenizer.path.empty(),
                {"data.tokenizer.type", "data.tokenizer.path"},
                "data.tokenizer.path must name the .model file of the sentencepiece tokenizer");
  check.require(d.tokenizer.type != TokenizerType::bpe || !d.tokenizer.path.empty(),
                {"data.tokenizer.type", "data.tokenizer.path"},
                "data.tokenizer.path must name the tokenizer.json of the bpe tokenizer");
  check.require(d.tokenizer.type != TokenizerType::byte || d.tokenizer.path.empty(),
                {"data.tokenizer.path", "data.tokenizer.type"},
                "data.tokenizer.path has no effect while type is byte; set type: sentencepiece or bpe");
  check.require(d.tokenizer.type == TokenizerType::bpe || d.tokenizer.end_of_document.empty(),
                {"data.tokenizer.end_of_document", "data.tokenizer.type"},
                "data.tokenizer.end_of_document has an effect only where type is bpe");
  check.size("data.seq_len", d.seq_len);
  check.require(!d.document_positions || d.document_mask, {"data.document_positions", "data.document_mask"},
                "data.document_positions: tokens of several documents would share positions and see each "
                "other; set document_mask: true");
  check.require(d.packing == Packing::stream || !d.begin_token, {"data.packing", "data.begin_token"},
                "data.packing: documents and begin_token are two ways to begin samples with a document; give "
                "one of them");
  check_sources(d.train, "data.train", check);
  check_sources(d.validation, "data.validation", check);
}

void check_analysis(const Config& c, Checks& check) {
  // With a vocab_size of 0 a SentencePiece model says how many tokens there are, and resolve_model checks.
  const bool bytes = c.data.tokenizer.type == TokenizerType::byte;
  const int64_t vocab_size = c.model.vocab_size > 0 ? c.model.vocab_size : bytes ? 257 : kMaxSize;
  const auto is_id = [&](int64_t token) { return token >= 0 && token < vocab_size; };
  if (c.data.begin_token) {
    check.require(is_id(*c.data.begin_token), {"data.begin_token", "model.vocab_size"},
                  fmt::format("data.begin_token = {} is outside the vocabulary of {} (model.vocab_size)",
                              *c.data.begin_token, vocab_size));
  }
  check.require(
      c.analysis.sink_threshold > 0 && c.analysis.sink_threshold < 1, {"analysis.sink_threshold"},
      fmt::format("analysis.sink_threshold = {} must lie between 0 and 1", c.analysis.sink_threshold));
  check.size("analysis.sink_length", c.analysis.sink_length);
  std::set<std::string> names = {"other"};  // the name of all other queries
  std::map<int64_t, std::string> class_of;
  for (size_t i = 0; i < c.analysis.query_classes.size(); ++i) {
    const QueryClassConfig& query_class = c.analysis.query_classes[i];
    const std::string key = fmt::format("analysis.query_classes[{}]", i);
    check.require(
        !query_class.name.empty() && query_class.name.find_first_of("/\\\n\t ") == std::string::npos &&
            names.insert(query_class.name).second,
        {key + ".name", key},
        fmt::format("{}.name must be a word that no other class has (\"other\" is taken), got \"{}\"", key,
                    query_class.name));
    check.require(!query_class.tokens.empty(), {key + ".tokens", key}, key + " needs a list of tokens");
    for (const int64_t token : query_class.tokens) {
      check.require(is_id(token), {key + ".tokens", "model.vocab_size"},
                    fmt::format("{}.tokens: {} is outside the vocabulary of {}", key, token, vocab_size));
      check.require(class_of.emplace(token, query_class.name).second, {key + ".tokens"},
                    fmt::format("{}.tokens: {} is listed twice", key, token));
    }
  }
}

void check_eval_ruler(const Config& c, Checks& check) {
  const RulerEvalConfig& ruler = c.eval.ruler;
  check.size("eval.ruler.samples", ruler.samples, 0);
  std::set<std::string> names;
  for (const std::string& task : ruler.tasks) {
    check.require(
        task == "niah_single_1" || task == "niah_multikey_2" || task == "niah_multikey_3",
        {"eval.ruler.tasks"},
        fmt::format("eval.ruler.tasks: {} is none of niah_single_1, niah_multikey_2 and niah_multikey_3; all "
                    "thirteen tasks are run by sluice ruler",
                    task));
    check.require(names.insert(task).second, {"eval.ruler.tasks"},
                  fmt::format("eval.ruler.tasks names {} twice", task));
  }
  check.require(ruler.samples <= 0 || !ruler.tasks.empty(), {"eval.ruler.tasks", "eval.ruler.samples"},
                "eval.ruler.tasks must name at least one task");
  std::set<int64_t> lengths;
  for (const int64_t length : ruler.lengths) {
    check.require(
        length >= 1 && length <= c.data.seq_len, {"eval.ruler.lengths", "data.seq_len"},
        fmt::format("eval.ruler.lengths: {} is not between 1 and data.seq_len = {}", length, c.data.seq_len));
    check.require(lengths.insert(length).second, {"eval.ruler.lengths"},
                  fmt::format("eval.ruler.lengths names {} twice", length));
  }
}

void check_rest(const Config& c, Checks& check) {
  check.require(!c.name.empty() && c.name.find('/') == std::string::npos && c.name[0] != '.', {"name"},
                fmt::format("name must be usable as a folder's name, got \"{}\"", c.name));
  check.count("eval.every_steps", c.eval.every_steps);
  check.count("eval.max_tokens", c.eval.max_tokens);
  check.count("checkpoint.every_steps", c.checkpoint.every_steps);
  check.not_negative("checkpoint.every_minutes", c.checkpoint.every_minutes);
  check.size("checkpoint.keep_last", c.checkpoint.keep_last);
  check.positive("checkpoint.timeout_seconds", c.checkpoint.timeout_seconds);
  check.count("checkpoint.keep_every_steps", c.checkpoint.keep_every_steps);
  check.size("log.every_steps", c.log.every_steps);
  check.size("log.trace_step", c.log.trace_step, 0);
  check.size("log.bits", c.log.bits, 0);
}

}  // namespace

int64_t training_steps(const Config& config) {
  if (config.train.max_steps > 0) return config.train.max_steps;
  const int64_t samples = config.train.global_batch_size, length = config.data.seq_len;
  if (config.train.max_tokens <= 0 || samples <= 0 || length <= 0 || samples > kMaxSize || length > kMaxSize)
    return 0;
  const int64_t per_step = samples * length;
  return config.train.max_tokens / per_step + (config.train.max_tokens % per_step != 0);
}

void check_combinations(const Config& config, ProblemSink& problem) {
  Checks check(problem);
  check_rest(config, check);
  check_eval_ruler(config, check);
  check_model_rules(config, check);
  check_sparse(config, problem);
  check_tasks(config, problem);
  check_data(config.data, check);
  check_analysis(config, check);
  check_training_rules(config, check);
}

void check_training(const Config& config, ProblemSink& problem) {
  Checks check(problem);
  const TrainConfig& t = config.train;
  check.require(t.max_steps > 0 || t.max_tokens > 0, {"train.max_steps", "train.max_tokens"},
                "the length of training is not given: set train.max_steps or train.max_tokens");
  check.require(
      t.max_steps == 0 || t.max_tokens == 0, {"train.max_tokens", "train.max_steps"},
      fmt::format("train.max_steps = {} and train.max_tokens = {} are both given; set one of them to 0",
                  t.max_steps, t.max_tokens));
  check.require(!config.data.train.empty(), {"data.train"},
                "there is no training data: data.train is empty; give it a list of {name: ..., path: ...}");
  check.require(config.model.attention.kernel == AttentionKernel::automatic ||
                    (t.device != DeviceChoice::cpu && built_with_cuda()),
                {"model.attention.kernel", "train.device"},
                "model.attention.kernel names a GPU kernel, but training is on the CPU; use auto");
}

void validate_for_training(const Config& config) {
  ProblemList problems;
  check_combinations(config, problems);
  check_training(config, problems);
  problems.raise();
}

}  // namespace sluice
