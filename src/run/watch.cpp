#include "run/watch.h"

#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr int64_t kReadAtOnce = int64_t{64} << 20;

template <class Json>
double number(const Json& object, const char* key, double absent) {
  const auto found = object.find(key);
  if (found == object.end()) return absent;
  return found->is_number() ? found->template get<double>() : found->is_null() ? NAN : absent;
}

int64_t whole(const json& object, const char* key, int64_t absent) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : absent;
}

std::string shown(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "nan";
}

/// Cut to a number of characters; the text is ASCII.
std::string cut(const std::string& text, size_t width) {
  return text.size() <= width ? text : text.substr(0, width > 0 ? width - 1 : 0) + "~";
}

}  // namespace

RunFollower::RunFollower(std::string folder) : folder_(std::move(folder)) {
  while (folder_.size() > 1 && folder_.back() == '/') folder_.pop_back();
  metrics_.path = folder_ + "/metrics.jsonl";
  evals_.path = folder_ + "/eval.jsonl";
  facts_.name = printable(std::filesystem::path(folder_).filename().string(), 40);
}

std::vector<std::string> RunFollower::new_lines(Tail& tail, bool& restarted) {
  struct stat info {};
  std::vector<std::string> lines;
  if (stat(tail.path.c_str(), &info) != 0) return lines;
  if (tail.file != info.st_ino || info.st_size < tail.offset) {
    restarted = tail.offset > 0;
    tail.offset = 0;
    tail.file = info.st_ino;
  }
  std::ifstream file(tail.path, std::ios::binary);
  file.seekg(tail.offset);
  std::string text(static_cast<size_t>(std::min<int64_t>(info.st_size - tail.offset, kReadAtOnce)), '\0');
  file.read(text.data(), std::ssize(text));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(text.substr(begin, end - begin));
  tail.offset += static_cast<int64_t>(begin);
  return lines;
}

void RunFollower::update() {
  bool restarted = false;
  const std::vector<std::string> lines = new_lines(metrics_, restarted);
  if (restarted) losses_.clear();
  for (const std::string& line : lines) {
    const json record = json::parse(line, nullptr, false);
    if (!record.is_object()) continue;
    const int64_t step = whole(record, "step", -1);
    if (step < 0) continue;
    while (!losses_.empty() && losses_.back().first >= step) losses_.pop_back();  // trained again
    facts_.loss = number(record, "loss", NAN);
    losses_.emplace_back(step, facts_.loss);
    facts_.step = step;
    facts_.grad_norm = number(record, "grad_norm", NAN);
    facts_.tokens_per_second = number(record, "tokens_per_second", 0);
    facts_.skipped = whole(record, "skipped", 0);
  }
  bool ignored = false;
  for (const std::string& line : new_lines(evals_, ignored)) {
    const auto record = nlohmann::ordered_json::parse(line, nullptr, false);
    const auto sets = record.is_object() ? record.find("sets") : record.end();
    if (!record.is_object() || sets == record.end() || !sets->is_object() || sets->empty()) continue;
    const auto first = sets->begin();
    if (first->is_object())
      facts_.validation = printable(first.key(), 16) + " " + shown(number(*first, "loss", NAN), 4);
  }
  read_status();
}

void RunFollower::read_status() {
  json status;
  try {
    status = json::parse(io::read_file(folder_ + "/status.json", 1 << 20), nullptr, false);
  } catch (const Error&) {
    return;
  }
  if (!status.is_object()) return;
  if (const auto state = status.find("state"); state != status.end() && state->is_string())
    facts_.state = printable(state->get<std::string>(), 12);
  facts_.max_steps = whole(status, "max_steps", facts_.max_steps);
  facts_.step = std::max(facts_.step, whole(status, "step", -1));
  facts_.seconds_left = number(status, "seconds_left", -1);
}

std::string sparkline(const std::vector<std::pair<int64_t, double>>& values, int width, bool unicode) {
  if (values.empty() || width <= 0) return std::string(static_cast<size_t>(std::max(width, 0)), ' ');
  constexpr std::array<const char*, 8> kBlocks = {"\xe2\x96\x81", "\xe2\x96\x82", "\xe2\x96\x83",
                                                  "\xe2\x96\x84", "\xe2\x96\x85", "\xe2\x96\x86",
                                                  "\xe2\x96\x87", "\xe2\x96\x88"};
  constexpr std::array<const char*, 8> kAscii = {"_", ".", "-", "~", "=", "+", "*", "#"};
  const auto& marks = unicode ? kBlocks : kAscii;
  struct Share {
    double sum = 0;
    int64_t count = 0, bad = 0;
  };
  std::vector<Share> shares(static_cast<size_t>(width));
  const int64_t first = values.front().first, steps = std::max<int64_t>(values.back().first - first + 1, 1);
  for (const auto& [step, value] : values) {
    const auto at = static_cast<size_t>(std::clamp<int64_t>((step - first) * width / steps, 0, width - 1));
    if (std::isfinite(value)) {
      shares[at].sum += value;
      ++shares[at].count;
    } else {
      ++shares[at].bad;
    }
  }
  double low = INFINITY, high = -INFINITY;
  for (Share& share : shares) {
    if (share.count == 0) continue;
    share.sum /= static_cast<double>(share.count);
    low = std::min(low, share.sum);
    high = std::max(high, share.sum);
  }
  std::string line;
  for (const Share& share : shares) {
    if (share.bad > 0) {
      line += '!';
    } else if (share.count == 0) {
      line += ' ';
    } else {
      const double place = high > low ? (share.sum - low) / (high - low) : 0;
      line += marks[static_cast<size_t>(std::min(place * 8, 7.0))];
    }
  }
  return line;
}

std::vector<std::string> watch_table(const std::vector<RunFollower>& runs, const Terminal& terminal) {
  size_t name_width = 3, validation_width = 10;
  for (const RunFollower& run : runs) {
    name_width = std::max(name_width, run.facts().name.size());
    validation_width = std::max(validation_width, run.facts().validation.size());
  }
  name_width = std::min<size_t>(name_width, 28);
  validation_width = std::min<size_t>(validation_width, 24);
  std::vector<std::string> lines = {
      fmt::format("{:<{}}  {:<9}  {:>15}  {:>8}  {:>7}  {:>7}  {:>6}  {:<{}}  course", "run", name_width,
                  "state", "step", "loss", "gn", "tok/s", "left", "validation", validation_width)};
  for (const RunFollower& run : runs) {
    const RunFollower::Facts& f = run.facts();
    const bool started = f.step >= 0;
    std::string step = started ? fmt::format("{}", f.step) : "-";
    if (started && f.max_steps > 0)
      step += fmt::format("/{} {:3.0f}%", f.max_steps,
                          100 * static_cast<double>(f.step) / static_cast<double>(f.max_steps));
    const bool has_loss = !run.losses().empty();
    std::string line = fmt::format(
        "{:<{}}  {:<9}  {:>15}  {:>8}  {:>7}  {:>7}  {:>6}  {:<{}}  ", cut(f.name, name_width), name_width,
        f.state.empty() ? "-" : cut(f.state, 9), step, has_loss ? shown(f.loss, 4) : "-",
        has_loss ? shown(f.grad_norm, 2) : "-", has_loss ? format_count(f.tokens_per_second) : "-",
        f.state == "running" && f.seconds_left >= 0 ? format_duration(f.seconds_left) : "-",
        cut(f.validation.empty() ? "-" : f.validation, validation_width), validation_width);
    const int room = terminal.width - static_cast<int>(line.size());
    if (room < 0) line.resize(static_cast<size_t>(terminal.width));
    lines.push_back(line + sparkline(run.losses(), std::clamp(room, 0, 60), terminal.unicode));
  }
  if (lines[0].size() > static_cast<size_t>(terminal.width))
    lines[0].resize(static_cast<size_t>(terminal.width));
  return lines;
}

}  // namespace sluice
