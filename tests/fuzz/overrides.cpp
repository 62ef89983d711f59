// key=value on the command line, one in each line of the input, over a configuration in which every list has
// an element.
#include "support/config_checks.h"

namespace sluice::fuzz {
namespace {

constexpr const char* kBase =
    "name: base\n"
    "model:\n"
    "  vocab_size: 300\n"
    "  moe: {num_experts: 4, num_experts_per_tok: 2, mlp_only_layers: [0]}\n"
    "  attention: {gates: [{position: query}, {}]}\n"
    "data:\n"
    "  train: [{name: a, path: a}]\n"
    "  validation: [{name: v, path: v}]\n"
    "train: {max_steps: 10, micro_batch_size: 2, global_batch_size: 8}\n"
    "optimizer: {rules: [{match: norm}]}\n"
    "analysis: {query_classes: [{name: digits, tokens: [48, 49]}]}\n";

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

std::string changed(const std::string& text, size_t most, Random& random) {
  if (random.one_in(4)) return mutated(text, most);
  std::vector<std::string> lines = lines_of(text);
  if (!lines.empty() && random.one_in(3)) {
    std::string& line = random.of(lines);
    const size_t equals = line.find('=');
    if (equals != std::string::npos && random.one_in(2)) {
      line = line.substr(0, equals + 1) + random_setting(random).value;
    } else if (random.one_in(4)) {
      lines.erase(lines.begin() + random.below(static_cast<uint32_t>(lines.size())));
    } else {
      line = mutated(line, 100);
    }
  } else {
    const Setting setting = random_setting(random);
    lines.push_back(setting.key + "=" + setting.value);
  }
  std::string out;
  for (const std::string& line : lines) out += line + "\n";
  return out;
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool written = (fuzz::write("base.yaml", fuzz::kBase), true);
  static_cast<void>(written);
  const std::vector<std::string> overrides = fuzz::lines_of(fuzz::text_of(data, size));
  Config config;
  KeyPlaces places;
  if (fuzz::attempt([&] { config = load_config("base.yaml", overrides, &places); }))
    fuzz::check_accepted(config);
  LoadPurpose purpose;
  purpose.ranks = 2;
  purpose.training = true;
  fuzz::attempt([&] { load_config("base.yaml", overrides, &places, purpose); });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::changed(text, most, random))
