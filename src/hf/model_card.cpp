#include "hf/model_card.h"

#include <spdlog/fmt/fmt.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "config/derived.h"
#include "core/io.h"

namespace sluice {
namespace {

constexpr int64_t kMaxLogBytes = int64_t{256} << 20;

std::string number(const nlohmann::json& j, const char* key) {
  const auto found = j.find(key);
  return found == j.end() || !found->is_number() ? "-" : fmt::format("{:.4f}", found->get<double>());
}

/// The line of RUN/eval.jsonl of a step; null if there is none. Damaged lines are skipped.
nlohmann::json evaluation_of(const CheckpointInfo& checkpoint) {
  auto path = std::filesystem::absolute(checkpoint.path).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // the slash that a shell adds
  const auto run = path.parent_path().parent_path();
  const std::string file = run / "eval.jsonl";
  nlohmann::json result;
  if (!io::exists(file) || io::is_directory(file)) return result;
  std::istringstream lines(io::read_file(file, kMaxLogBytes));
  for (std::string line; std::getline(lines, line);) {
    nlohmann::json j = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (j.is_object() && j.contains("step") && j["step"] == checkpoint.step) result = std::move(j);
  }
  return result;
}

std::string results(const nlohmann::json& evaluation) {
  const auto sets = evaluation.is_object() ? evaluation.find("sets") : evaluation.end();
  if (!evaluation.is_object() || sets == evaluation.end()) return "";
  std::string text =
      "## Results\n\n| validation set | loss (nats) | perplexity | bits per byte |\n|---|---|---|---|\n";
  const auto row = [&](const std::string& name, const nlohmann::json& set) {
    if (set.is_object())
      text += fmt::format("| {} | {} | {} | {} |\n", name, number(set, "loss"), number(set, "perplexity"),
                          number(set, "bits_per_byte"));
  };
  if (sets->is_object())
    for (const auto& [name, set] : sets->items()) row(name, set);
  if (sets->is_array())
    for (const nlohmann::json& set : *sets) row(set.is_object() ? set.value("name", "") : "", set);
  return text + "\n";
}

std::string attention_text(const AttentionConfig& a) {
  std::string text =
      fmt::format("{} attention", EnumNames<AttentionKind>::names[static_cast<size_t>(a.kind)]);
  for (const GateConfig& g : a.gates)
    text += fmt::format(", {} {} gate at {}",
                        EnumNames<GateGranularity>::names[static_cast<size_t>(g.granularity)],
                        EnumNames<GateActivation>::names[static_cast<size_t>(g.activation)],
                        EnumNames<GatePosition>::names[static_cast<size_t>(g.position)]);
  return text;
}

}  // namespace

std::string model_card(const CheckpointInfo& checkpoint, const Config& config, HfFormat format,
                       bool tokenizer_begins) {
  const ModelConfig& m = config.model;
  const bool own = format == HfFormat::sluice, repository = format == HfFormat::gated_attention;
  std::string text = fmt::format(
      "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {}\n\n"
      "Pretrained with Sluice: {} layers, hidden size {}, {} heads over {} key/value heads of {}, {}.\n"
      "Step {}, {} tokens in samples of {}.\n\n",
      config.name, m.num_hidden_layers, m.hidden_size, m.num_attention_heads, m.num_key_value_heads,
      m.head_dim, attention_text(m.attention), checkpoint.step, checkpoint.step * tokens_per_step(config),
      config.data.seq_len);
  text += results(evaluation_of(checkpoint));
  text += "## Use\n\n";
  if (repository)
    text +=
        "The weights are named and ordered as in https://github.com/qiuzh20/gated_attention; load them with\n"
        "that repository's modeling_qwen3.py.\n";
  else
    text += fmt::format(
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        "model = AutoModelForCausalLM.from_pretrained(\".\"{})\n"
        "tokenizer = AutoTokenizer.from_pretrained(\".\")\n```\n",
        own ? ", trust_remote_code=True" : "");
  if (config.data.begin_token)
    text += fmt::format("\nEvery document began with token {} in training: {}.\n", *config.data.begin_token,
                        tokenizer_begins ? "the tokenizer puts it before a text" : "put it before the text");
  return text;
}

}  // namespace sluice
