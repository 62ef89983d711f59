#include "eval/ruler_files.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "core/io.h"
#include "core/line_reader.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

constexpr int64_t kLongestLine = int64_t{1} << 26;

nlohmann::ordered_json to_json(const RulerAnswer& a) {
  return {{"task", name(a.task)}, {"length", a.length}, {"sample", a.sample},         {"depth", a.depth},
          {"score", a.score},     {"tokens", a.tokens}, {"prediction", a.prediction}, {"outputs", a.outputs}};
}

int64_t integer_of(const nlohmann::json& json, const char* key, const std::string& where) {
  const nlohmann::json& value = json.at(key);
  if (!value.is_number_integer() || value < 0 || value > int64_t{1} << 53)
    fail(ExitCode::data, "{}: \"{}\" must be a whole number from 0 on", where, key);
  return value.get<int64_t>();
}

double number_of(const nlohmann::json& json, const char* key, double least, double most,
                 const std::string& where) {
  const nlohmann::json& value = json.at(key);
  if (!value.is_number() || !(value.get<double>() >= least && value.get<double>() <= most))
    fail(ExitCode::data, "{}: \"{}\" must be a number from {} to {}", where, key, least, most);
  return value.get<double>();
}

RulerAnswer answer_of(const nlohmann::json& json, const std::string& where) {
  try {
    const auto task = ruler_task(json.at("task").get<std::string>());
    if (!task) fail(ExitCode::data, "{}: unknown task {}", where, printable(json.at("task").dump()));
    return {*task,
            integer_of(json, "length", where),
            integer_of(json, "sample", where),
            number_of(json, "depth", -1, 100, where),
            number_of(json, "score", 0, 1, where),
            integer_of(json, "tokens", where),
            json.at("outputs").get<std::vector<std::string>>(),
            json.at("prediction").get<std::string>()};
  } catch (const nlohmann::json::exception& error) {
    fail(ExitCode::data, "{}: not an answer of sluice ruler ({})", where, printable(error.what()));
  }
}

std::vector<std::string> complete_lines(const std::string& text) {
  std::vector<std::string> lines;
  size_t at = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', at)) {
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

double percent(double sum, int64_t count) {
  return count > 0 ? std::round(1e4 * sum / static_cast<double>(count)) / 100 : 0;
}

}  // namespace

std::vector<RulerPrompt> read_ruler_prompts(const std::string& path) {
  std::vector<RulerPrompt> prompts;
  LineReader reader(path);
  for (std::string line; reader.next(line, kLongestLine);) {
    const std::string where = fmt::format("{}:{}", path, reader.line_number());
    if (reader.within_line()) fail(ExitCode::data, "{}: the line is longer than 64 MiB", where);
    if (line.find_first_not_of(" \t\r\n") == std::string::npos) continue;
    const nlohmann::json json = parse_strict_json(line, where);
    RulerPrompt p;
    try {
      p.input = json.at("input");
      p.outputs = json.at("outputs").get<std::vector<std::string>>();
      if (json.contains("answer_prefix")) p.answer_prefix = json["answer_prefix"];
    } catch (const nlohmann::json::exception&) {
      fail(ExitCode::data, "{}: a prompt of RULER needs \"input\", a text, and \"outputs\", a list of texts",
           where);
    }
    p.given = true;
    if (p.outputs.empty()) fail(ExitCode::data, "{}: \"outputs\" is empty", where);
    prompts.push_back(std::move(p));
  }
  if (prompts.empty()) fail(ExitCode::data, "{}: no prompt", path);
  return prompts;
}

RulerTask task_of_file(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  const std::string file = slash == std::string::npos ? path : path.substr(slash + 1),
                    folder = slash == std::string::npos ? "" : path.substr(0, slash);
  for (const std::string& part :
       {file.substr(0, file.find('.')), folder.substr(folder.find_last_of('/') + 1)})
    if (const auto task = ruler_task(part)) return *task;
  fail(ExitCode::usage, "{}: name the file, or its folder, after its task: niah_single_1.jsonl", path);
}

RulerResults::RulerResults(const std::string& path, const nlohmann::ordered_json& header, int rank,
                           bool keeps)
    : path_(path), header_(header.dump()) {
  if (!keeps) {
    read(path_);
    return;
  }
  kept_in_ = rank == 0 ? path : fmt::format("{}.rank{}", path, rank);
  if (rank == 0)
    lock_.emplace(path_ + ".lock",
                  fmt::format("{}: another sluice ruler answers these prompts; wait for it, or give another "
                              "folder with -o",
                              path_));
  if (io::exists(path_)) read(path_);
  if (rank > 0) {
    io::write_file_atomic(kept_in_, header_ + "\n");
    return;
  }
  std::string text = header_ + "\n";
  for (const RulerAnswer& answer : answers_) text += to_json(answer).dump() + "\n";
  io::write_file_atomic(path_, text);
  take_over();
}

void RulerResults::read(const std::string& path) {
  const std::vector<std::string> lines = complete_lines(io::read_file(path));
  if (!lines.empty() && lines[0] != header_)
    fail(ExitCode::usage,
         "{} has answers to other prompts or of another model: {}, not {}; give another folder with -o, or "
         "remove it",
         path, printable(lines[0], 600), printable(header_, 600));
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::string where = fmt::format("{}:{}", path, i + 1);
    const RulerAnswer answer = answer_of(parse_strict_json(lines[i], where), where);
    if (!has(answer.task, answer.length, answer.sample))  // else by a rank that was killed in take_over()
      answers_.push_back(answer);
  }
}

void RulerResults::take_over() {
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  const std::string prefix = std::filesystem::path(path_).filename().string() + ".rank";
  for (const std::string& name : io::list_directory(folder.empty() ? "." : folder)) {
    if (!name.starts_with(prefix)) continue;
    const std::string rank = name.substr(prefix.size());
    if (rank.find_first_not_of("0123456789") != std::string::npos) continue;  // half written
    const std::string part = path_ + ".rank" + rank;
    const size_t known = answers_.size();
    read(part);
    std::string text;
    for (size_t i = known; i < answers_.size(); ++i) text += to_json(answers_[i]).dump() + "\n";
    io::OutputFile file(path_, io::OutputFile::Mode::append);
    file.write(text);
    file.close();
    io::remove_file(part);
  }
}

bool RulerResults::has(RulerTask task, int64_t length, int64_t sample) const {
  return std::any_of(answers_.begin(), answers_.end(), [&](const RulerAnswer& a) {
    return a.task == task && a.length == length && a.sample == sample;
  });
}

void RulerResults::add(const RulerAnswer& answer) {
  if (!kept_in_.empty()) {
    io::OutputFile file(kept_in_, io::OutputFile::Mode::append);
    file.write(to_json(answer).dump() + "\n");
    file.close();
  }
  answers_.push_back(answer);
}

nlohmann::ordered_json ruler_summary(const std::vector<RulerAnswer>& answers,
                                     const nlohmann::ordered_json& header) {
  struct Sum {
    double score = 0;
    int64_t count = 0, tokens = 0;
    void add(const RulerAnswer& a) { score += a.score, tokens += a.tokens, ++count; }
  };
  std::map<std::pair<RulerTask, int64_t>, Sum> cells;
  std::map<std::tuple<RulerTask, int64_t, double>, Sum> depths;
  std::set<int64_t> lengths;
  std::set<RulerTask> tasks;
  for (const RulerAnswer& a : answers) {
    cells[{a.task, a.length}].add(a);
    if (a.depth >= 0) depths[{a.task, a.length, a.depth}].add(a);
    lengths.insert(a.length);
    tasks.insert(a.task);
  }
  nlohmann::ordered_json summary = header;
  summary["cells"] = summary["depths"] = nlohmann::ordered_json::array();
  for (const auto& [cell, sum] : cells)
    summary["cells"].push_back({{"task", name(cell.first)},
                                {"length", cell.second},
                                {"samples", sum.count},
                                {"tokens", sum.tokens / sum.count},
                                {"score", percent(sum.score, sum.count)}});
  // Columns of different tasks could not be compared.
  std::erase_if(tasks, [&](RulerTask task) {
    return std::any_of(lengths.begin(), lengths.end(), [&](int64_t l) { return !cells.count({task, l}); });
  });
  summary["average"] = nlohmann::ordered_json::object();
  for (const int64_t length : lengths) {
    double sum = 0;
    for (const RulerTask task : tasks) {
      const Sum& cell = cells[{task, length}];
      sum += cell.score / static_cast<double>(cell.count);
    }
    if (!tasks.empty())
      summary["average"][std::to_string(length)] = percent(sum, static_cast<int64_t>(tasks.size()));
  }
  for (const auto& [at, sum] : depths)
    summary["depths"].push_back({{"task", name(std::get<0>(at))},
                                 {"length", std::get<1>(at)},
                                 {"depth", std::get<2>(at)},
                                 {"samples", sum.count},
                                 {"score", percent(sum.score, sum.count)}});
  return summary;
}

std::string ruler_table(const nlohmann::ordered_json& summary) {
  std::set<int64_t> lengths;
  std::map<std::string, std::map<int64_t, std::string>> rows;
  std::map<std::string, std::pair<int64_t, int64_t>> samples;  // of a task: the fewest and the most
  std::vector<std::string> tasks;
  for (const auto& cell : summary["cells"]) {
    const std::string task = cell["task"];
    const auto count = cell["samples"].get<int64_t>();
    if (!rows.count(task)) tasks.push_back(task), samples[task] = {count, count};
    auto& [fewest, most] = samples[task];
    fewest = std::min(fewest, count), most = std::max(most, count);
    lengths.insert(cell["length"].get<int64_t>());
    rows[task][cell["length"]] = fmt::format("{:.1f}", cell["score"].get<double>());
  }
  std::string text = fmt::format("{:<18}", "task");
  for (const int64_t length : lengths) text += fmt::format("{:>9}", length);
  text += fmt::format("{:>10}", "samples");
  const auto add_row = [&](const std::string& title, const std::function<std::string(int64_t)>& value) {
    text += fmt::format("\n{:<18}", title);
    for (const int64_t length : lengths) text += fmt::format("{:>9}", value(length));
  };
  for (const std::string& task : tasks) {
    add_row(task, [&](int64_t length) { return rows[task].count(length) ? rows[task][length] : "-"; });
    const auto& [fewest, most] = samples[task];
    text += fmt::format("{:>10}", fewest == most ? std::to_string(most) : fmt::format("{}-{}", fewest, most));
  }
  if (!summary["average"].empty())
    add_row("average", [&](int64_t length) {
      return fmt::format("{:.1f}", summary["average"][std::to_string(length)].get<double>());
    });
  return text + "\n";
}

}  // namespace sluice
