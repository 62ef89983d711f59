// Logs that a run leaves and a later one reads: metrics.jsonl, opened again at a step of a checkpoint;
// bits.log, compared with another one. The input is metrics.jsonl, then "=== b" and the other log.
#include <cstdint>
#include <nlohmann/json.hpp>

#include "checkpoint/state_hash.h"
#include "run/json_lines.h"
#include "support/fuzz.h"

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
    fuzz::must("a log that was opened once is refused", [&] {
      fuzz::expect(JsonLines("a", kLast).last_step() == last, "opened again, the log ends elsewhere");
      fuzz::expect(JsonLines("a", kLast + 1).last_step() <= kLast, "a line that was removed is back");
    });
  });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::mutated_lines(text, most, random))
