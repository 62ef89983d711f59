// Logs that a run leaves and a later one reads: metrics.jsonl, opened again at a step of a checkpoint;
// bits.log, compared with another one. The input is metrics.jsonl, then "=== b" and the other log.
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "checkpoint/state_hash.h"
#include "run/json_lines.h"
#include "support/fuzz.h"

namespace sluice::fuzz {
namespace {

/// One line changed as JSON, copied, or cut.
std::string changed(const std::string& archive, size_t most, Random& random) {
  if (random.one_in(4)) return mutated_archive(archive, most, random);
  Files files = split(archive);
  std::string& text = random.of(files).second;
  const size_t middle = random.below(static_cast<uint32_t>(text.size()) + 1);
  const size_t before = middle == 0 ? std::string::npos : text.rfind('\n', middle - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1,
               end = std::min(text.find('\n', begin), text.size());
  const std::string line = text.substr(begin, end - begin);
  switch (random.below(4)) {
    case 0:
      text.insert(begin, line + "\n");
      break;
    case 1:
      text.erase(middle, random.below(100));
      break;
    default:
      text.replace(begin, line.size(), mutated_json(line, 500, random));
      break;
  }
  const std::string out = join(files);
  return out.size() <= most ? out : archive.substr(0, most);
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::clear();
  const fuzz::Files files = fuzz::split(fuzz::text_of(data, size));
  fuzz::write("a", files[0].second);
  fuzz::write("b", files.size() > 1 ? files[1].second : "");
  fuzz::attempt([&] { compare_bits("a", "b"); });
  fuzz::attempt([&] { fuzz::expect(compare_bits("a", "a").step == -1, "a bits.log differs from itself"); });

  constexpr int64_t kLast = 5;
  fuzz::attempt([&] {
    int64_t last = 0;
    {
      JsonLines log("a", kLast);
      last = log.last_step();
      fuzz::expect(last >= -1 && last <= kLast, "a line after the last step was kept");
      log.append({{"step", kLast + 1}, {"loss", 1.5}});
    }
    const std::string text = fuzz::read("a");
    fuzz::expect(text.ends_with('\n'), "the last line has no end");
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = text.find('\n', begin);
      const auto line = nlohmann::json::parse(text.substr(begin, end - begin), nullptr, false);
      fuzz::expect(line.is_object() && line.contains("step"), "a line that is none was kept");
      begin = end + 1;
    }
    fuzz::expect(JsonLines("a", kLast).last_step() == last, "opened again, the log ends elsewhere");
    fuzz::expect(JsonLines("a", kLast + 1).last_step() <= kLast, "a line that was removed is back");
  });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::changed(text, most, random))
