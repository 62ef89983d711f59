#include "support/config_checks.h"

#include <spdlog/fmt/fmt.h>

#include <map>
#include <nlohmann/json.hpp>

#include "config/json.h"
#include "config/model_function.h"
#include "hf/config.h"

namespace sluice::fuzz {
namespace {

void check_yaml(const Config& config) {
  const std::string text = to_yaml(config);
  write("written.yaml", text);
  Config again;
  try {
    again = load_resolved_config("written.yaml");
  } catch (const Error& error) {
    finding(fmt::format("the resolved configuration is refused when it is read back: {}\n{}", error.what(),
                        text));
  }
  const std::string second = to_yaml(again);
  if (second != text)
    finding(fmt::format("the configuration changes when it is written and read back:\n{}\n---\n{}", text,
                        second));
  expect(config_changes(config, again).empty(), "written and read back, the configuration has changes");
  expect(config_hash(config) == config_hash(again),
         "written and read back, the configuration has another hash");
  expect(function_differences(config.model, again.model).empty(),
         "written and read back, the model computes another function");
}

void check_hf_config(const Config& config) {
  if (config.model.vocab_size == 0) return;  // not known until the tokenizer is read
  write("config.json", hf_config(config, 0).dump());
  try {
    const HfModel read = read_hf_config("config.json");
    for (const FunctionDifference& d : function_differences(read.model, config.model))
      finding(fmt::format("config.json describes another function: {} is {}, read back {}", d.key, d.here,
                          d.source));
    for (const HfModel::Unsupported& u : read.unsupported)
      finding(fmt::format("config.json says {}, which the reader does not support", u.what));
  } catch (const Error& error) {
    finding(fmt::format("the config.json of an accepted configuration is refused: {}", error.what()));
  }
}

}  // namespace

void check_accepted(const Config& config) {
  check_yaml(config);
  if (!nlohmann::json::accept(to_json(config))) finding("the configuration as JSON is not JSON");
  check_hf_config(config);
}

Setting random_setting(Random& random) {
  static const std::vector<KeyInfo> keys = config_keys();
  const KeyInfo& info = random.of(keys);
  Setting setting{info.key, ""};
  for (size_t at; (at = setting.key.find("[]")) != std::string::npos;)
    setting.key.replace(at, 2, random.one_in(8) ? "[1]" : "[0]");

  static const char* const numbers[] = {"0",
                                        "1",
                                        "2",
                                        "3",
                                        "4",
                                        "8",
                                        "64",
                                        "257",
                                        "1024",
                                        "100000",
                                        "2147483647",
                                        "2147483648",
                                        "4294967296",
                                        "9223372036854775807",
                                        "-9223372036854775808",
                                        "9223372036854775808",
                                        "-1",
                                        "-2",
                                        "1e9",
                                        "20B",
                                        "64Ki",
                                        "9e18",
                                        "1T",
                                        "18446744073709551615",
                                        "1e-5",
                                        "0.5",
                                        "0.999",
                                        "1e308",
                                        "-1e308",
                                        "5e-324",
                                        "1e-400",
                                        "-0",
                                        ".5",
                                        "1.",
                                        "0.1e1",
                                        "0x10",
                                        "010",
                                        "1_000"};
  static const char* const words[] = {"null",
                                      "true",
                                      "false",
                                      "[]",
                                      "{}",
                                      "\"\"",
                                      "\"a b\"",
                                      "a",
                                      "[0]",
                                      "[1, 1, 3]",
                                      "[a]",
                                      "[{}]",
                                      "[{name: a, path: b}]",
                                      "[{name: a, tokens: [1]}]",
                                      "[{position: query}]",
                                      "[{match: a}]",
                                      "model",
                                      "\"\\x09\\u00e9\"",
                                      "~",
                                      "a/../..",
                                      ".",
                                      "\"\\\\\"",
                                      "'it''s'",
                                      "|",
                                      "<<",
                                      "&a",
                                      "*a",
                                      "!!int 1"};
  const size_t bar = info.type.find(" | ");
  if (random.one_in(10)) {
    setting.value = random.of(words);
  } else if (bar != std::string::npos) {  // one of the words that are allowed
    std::vector<std::string> allowed;
    for (size_t begin = 0; begin <= info.type.size();) {
      const size_t end = std::min(info.type.find(" | ", begin), info.type.size());
      allowed.push_back(info.type.substr(begin, end - begin));
      begin = end + 3;
    }
    setting.value = random.of(allowed);
  } else if (info.type.find("integer") != std::string::npos ||
             info.type.find("number") != std::string::npos) {
    setting.value = random.of(numbers);
    if (info.type.starts_with("list")) setting.value = "[" + setting.value + "]";
  } else if (info.type == "true or false") {
    setting.value = random.one_in(2) ? "true" : "false";
  } else {
    setting.value = random.of(words);
  }
  return setting;
}

std::string random_yaml(Random& random) {
  // Elements of lists are left out: they are written in flow style, among the words.
  std::map<std::string, std::string> values;
  for (uint32_t n = 1 + random.below(8); n > 0; --n) {
    const Setting setting = random_setting(random);
    if (setting.key.find('[') == std::string::npos) values[setting.key] = setting.value;
  }
  std::string text;
  std::vector<std::string> open;
  for (const auto& [key, value] : values) {
    std::vector<std::string> parts;
    for (size_t begin = 0; begin <= key.size();) {
      const size_t end = std::min(key.find('.', begin), key.size());
      parts.push_back(key.substr(begin, end - begin));
      begin = end + 1;
    }
    size_t same = 0;
    while (same < open.size() && same + 1 < parts.size() && open[same] == parts[same]) ++same;
    open.resize(same);
    for (; open.size() + 1 < parts.size(); open.push_back(parts[open.size()]))
      text += std::string(2 * open.size(), ' ') + parts[open.size()] + ":\n";
    text += std::string(2 * open.size(), ' ') + parts.back() + ": " + value + "\n";
  }
  return text;
}

}  // namespace sluice::fuzz
