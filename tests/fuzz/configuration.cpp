// A configuration in YAML, with files that it extends: loaded, validated for one rank and for four, written,
// read back; and as JSON for programs in other languages.
#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

#include "config/json.h"
#include "support/config_checks.h"

namespace sluice::fuzz {
namespace {

std::string changed(const std::string& archive, size_t most, Random& random) {
  if (random.one_in(4)) return random_yaml(random);
  if (!random.one_in(3)) return mutated_archive(archive, most, random);
  // A setting of one line, in flow style, at the end of a line.
  const Setting setting = random_setting(random);
  std::string line = setting.value, rest = setting.key;
  for (size_t dot; (dot = rest.rfind('.')) != std::string::npos; rest.resize(dot))
    line = fmt::format("{{{}: {}}}", rest.substr(dot + 1), line);
  std::string out = archive;
  const size_t at = out.find('\n', random.below(static_cast<uint32_t>(out.size()) + 1));
  out.insert(at == std::string::npos ? out.size() : at, fmt::format("\n{}: {}", rest, line));
  return out;
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::clear();
  const fuzz::Files files = fuzz::split(fuzz::text_of(data, size));
  for (const auto& [name, content] : files) fuzz::write(name.empty() ? "a.yaml" : name, content);
  Config config;
  KeyPlaces places;
  if (fuzz::attempt([&] { config = load_config("a.yaml", {}, &places); })) {
    fuzz::check_accepted(config);
    fuzz::attempt([&] { validate_for_training(config); });
  }
  LoadPurpose purpose;
  purpose.ranks = 4;
  purpose.training = true;
  fuzz::attempt([&] { load_config("a.yaml", {"name=b"}, &places, purpose); });
  for (const bool with_places : {false, true})
    fuzz::attempt([&] {
      fuzz::expect(nlohmann::json::accept(yaml_file_to_json("a.yaml", with_places)),
                   "YAML as JSON is not JSON");
    });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::changed(text, most, random))
