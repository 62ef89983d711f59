#include "hf/import.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/store.h"
#include "config/load.h"
#include "core/io.h"
#include "hf/layouts.h"
#include "hf/open.h"

namespace sluice {
namespace {

/// A line of to_yaml: "    theta: 10000" is ("model.rope.theta", "10000").
struct Line {
  std::string text, key, value;
  size_t depth = 0;
};

std::vector<Line> lines_of(const std::string& yaml) {
  std::vector<Line> lines;
  std::vector<std::string> path;
  for (size_t begin = 0; begin < yaml.size();) {
    const size_t end = std::min(yaml.find('\n', begin), yaml.size());
    const std::string text = yaml.substr(begin, end - begin);
    begin = end + 1;
    const size_t indent = text.find_first_not_of(' ');
    if (indent == std::string::npos) continue;
    Line line{text, "", "", indent / 2};
    const size_t colon = text.find(':');
    const bool element = text[indent] == '-';
    path.resize(line.depth);
    if (!element && colon != std::string::npos) path.push_back(text.substr(indent, colon - indent));
    line.key = fmt::format("{}{}", fmt::join(path, "."), element ? "[]" : "");
    line.value = element ? text : text.substr(colon + 1);
    lines.push_back(line);
  }
  return lines;
}

/// The lines of the sections that differ from the defaults, and the sizes, with the sections that they are
/// in.
std::string different_lines(const std::string& yaml, const std::set<std::string>& always) {
  std::map<std::string, std::string> defaults;
  for (const Line& line : lines_of(to_yaml(Config{}))) defaults[line.key] = line.value;
  const std::vector<Line> lines = lines_of(yaml);
  std::string text;
  std::vector<const Line*> open;  // sections above the current line
  size_t written = 0;             // of which so many are in the text
  for (const Line& line : lines) {
    while (!open.empty() && open.back()->depth >= line.depth) open.pop_back();
    written = std::min(written, open.size());
    const bool element = line.key.ends_with("[]");
    if (line.value.empty()) {
      open.push_back(&line);
      continue;
    }
    const auto found = defaults.find(line.key);
    if (!element && found != defaults.end() && found->second == line.value && !always.count(line.key))
      continue;
    for (; written < open.size(); ++written) text += open[written]->text + "\n";
    text += line.text + "\n";
  }
  return text;
}

const std::set<std::string> kSizes = {
    "model.vocab_size",          "model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads",
    "model.num_key_value_heads", "model.head_dim",    "model.intermediate_size", "model.tie_word_embeddings",
    "model.rms_norm_eps",        "model.rope.theta",  "model.qk_norm",           "data.seq_len"};

}  // namespace

Import import_folder(const std::string& folder) {
  Import out;
  const HfModel source = read_hf_config(folder + "/config.json");
  Config config = hf_folder_config(folder, source);
  // The same checks as of any configuration, so that sizes are sound before a model is built of them.
  config = load_resolved_text(to_yaml(config), folder + "/config.json, as a configuration");
  const std::vector<TensorShape> tensors = model_tensors(config.model);
  const WeightMap map = weight_map(source.format, config.model);
  const WeightReport weights = compare_weights(folder, tensors, {map, {}});

  int64_t parameters = 0;
  for (const TensorShape& t : tensors) {
    int64_t count = 1;
    for (const int64_t n : t.shape) count *= n;
    parameters += count;
  }
  out.report.push_back(fmt::format("model        {} ({} parameters)", source.model_type, parameters));
  out.report.push_back(
      fmt::format("mapped       {} tensors{}", weights.loaded,
                  map.sources.empty()
                      ? ""
                      : fmt::format(", {} of them stored in another order or as w - 1", map.sources.size())));
  if (!weights.ignored.empty())
    out.report.push_back(fmt::format("left out     {} tensors: {}{}", weights.ignored.size(),
                                     weights.ignored.front(), weights.ignored.size() > 1 ? ", ..." : ""));
  if (config.data.begin_token)
    out.report.push_back(
        fmt::format("begins       each text with token {} (data.begin_token)", *config.data.begin_token));
  std::vector<std::string> accepts;
  for (const HfModel::Unsupported& u : source.unsupported) {
    out.unsupported.push_back(u.what);
    out.report.push_back("cannot hold  " + u.what);
    if (!u.accepted_by.empty() && std::find(accepts.begin(), accepts.end(), u.accepted_by) == accepts.end())
      accepts.push_back(u.accepted_by);
  }
  out.yaml = fmt::format("# The model of {}/config.json, written by sluice import.\n", folder);
  for (const std::string& what : out.unsupported)
    out.yaml += fmt::format("# It has no counterpart of: {}\n", what);
  config.train.init_from = folder;
  config.train.micro_batch_size = TrainConfig().micro_batch_size;
  config.train.global_batch_size = TrainConfig().global_batch_size;
  config.name.clear();
  config.run_dir.clear();
  out.yaml += different_lines(to_yaml(config), kSizes);
  if (!accepts.empty())
    out.yaml += fmt::format(
        "  # To train another function than these weights were trained for:\n"
        "  # init_ignore: [{}]\n",
        fmt::join(accepts, ", "));
  return out;
}

}  // namespace sluice
