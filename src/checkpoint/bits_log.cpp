// bits.log: its lines, and the comparison of two of them.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>

#include "checkpoint/state_hash.h"
#include "core/io.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

std::string hex(double value) { return fmt::format("{:016x}", std::bit_cast<uint64_t>(value)); }

using Lines = std::map<int64_t, nlohmann::json>;

/// Other lines were cut by a crash or a full disk, or damaged.
bool is_bits_line(const nlohmann::json& line) {
  const auto holds_text = [&](const char* key) { return line.contains(key) && line[key].is_string(); };
  return line.is_object() && line.contains("step") && line["step"].is_number_integer() &&
         holds_text("loss") && holds_text("grad_norm") && (!line.contains("state") || holds_text("state"));
}

Lines read_bits(const std::string& path) {
  const std::string text = io::read_file(path);
  Lines lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const nlohmann::json line = nlohmann::json::parse(text.substr(begin, end - begin), nullptr, false);
    begin = end + 1;
    if (is_bits_line(line)) lines[line["step"].get<int64_t>()] = line;
  }
  if (lines.empty()) fail(ExitCode::data, "{}: not a bits.log (log.bits)", path);
  return lines;
}

double value_of(const std::string& digits) {
  return std::bit_cast<double>(static_cast<uint64_t>(std::strtoull(digits.c_str(), nullptr, 16)));
}

}  // namespace

nlohmann::ordered_json bits_line(int64_t step, double loss, double grad_norm) {
  return {{"step", step}, {"loss", hex(loss)}, {"grad_norm", hex(grad_norm)}};
}

BitsComparison compare_bits(const std::string& path_a, const std::string& path_b) {
  const Lines a = read_bits(path_a), b = read_bits(path_b);
  BitsComparison c;
  c.last_a = a.rbegin()->first;
  c.last_b = b.rbegin()->first;
  const auto differs = [&](int64_t step, const std::string& what) {
    c.step = step;
    c.difference = what;
    return c;
  };
  const int64_t end = std::min(c.last_a, c.last_b);
  for (auto x = a.begin(), y = b.begin(); x != a.end() || y != b.end();) {
    const int64_t step = std::min(x == a.end() ? INT64_MAX : x->first, y == b.end() ? INT64_MAX : y->first);
    if (step > end) break;
    if (x == a.end() || x->first != step) return differs(step, "missing from " + path_a);
    if (y == b.end() || y->first != step) return differs(step, "missing from " + path_b);
    for (const char* what : {"loss", "grad_norm"}) {
      const std::string p = x->second.value(what, ""), q = y->second.value(what, "");
      if (p != q)
        return differs(step, fmt::format("{} {:.9g} and {:.9g} ({} and {})", what, value_of(p), value_of(q),
                                         printable(p), printable(q)));
    }
    ++c.steps;
    if (x->second.contains("state") && y->second.contains("state")) {
      ++c.states;
      const std::string p = x->second.value("state", ""), q = y->second.value("state", "");
      if (p != q)
        return differs(
            step, fmt::format("state (hash of weights and moments) {} and {}", printable(p), printable(q)));
    }
    ++x, ++y;
  }
  return c;
}

}  // namespace sluice
