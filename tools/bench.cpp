// sluice bench: speed of the machine, of single ops and of whole training steps, in one run.
#include <spdlog/fmt/fmt.h>
#include <sys/resource.h>

#include <fstream>
#include <memory>
#include <sstream>

#include "bench.h"
#include "commands.h"
#include "core/cpu_features.h"
#include "core/io.h"
#include "core/parallel_for.h"

namespace sluice {
namespace {

using nlohmann::json;

struct BenchOptions {
  std::vector<std::string> parts{"peak", "ops", "step"}, models{"small", "qwen", "qwen-elementwise"},
      precisions{"f32", "bf16"};
  double seconds = 0;
  int threads = 0;
  bool profile = false;
  std::string json_file;
};

/// Processor time used by everything on this machine, and by this process, in seconds.
struct Usage {
  double machine = 0, own = 0;
  static Usage read() {
    Usage u;
    std::ifstream file("/proc/stat");
    std::string line;
    std::getline(file, line);
    std::istringstream fields(line.substr(std::min<size_t>(line.size(), 4)));
    double user = 0, nice = 0, system = 0;
    fields >> user >> nice >> system;
    u.machine = (user + nice + system) / 100;  // USER_HZ
    rusage own{};
    getrusage(RUSAGE_SELF, &own);
    const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
    u.own = seconds(own.ru_utime) + seconds(own.ru_stime);
    return u;
  }
};

std::string number(const json& row, const char* key, const char* format) {
  return row.contains(key) ? fmt::format(fmt::runtime(format), row[key].get<double>()) : "";
}

void print_step(const json& row) {
  fmt::print("{:<18}{:<6}{:>9.1f} ms{:>10.0f} tokens/s{:>9.1f} GFLOP/s{:>7.1f} % of FMA peak   ({:.1f} M parameters)\n",
             row["model"].get<std::string>(), row["precision"].get<std::string>(), row["ms"].get<double>(),
             row["tokens_per_second"].get<double>(), row["gflops"].get<double>(), row["percent_of_peak"].get<double>(),
             row["parameters"].get<double>() * 1e-6);
  if (!row.contains("profile")) return;
  for (const json& e : row["profile"])
    if (e["percent"].get<double>() >= 0.1)
      fmt::print("    {:<34}{:>9.2f} ms{:>7.1f} %{:>7.0f} calls\n", e["op"].get<std::string>(), e["ms"].get<double>(),
                 e["percent"].get<double>(), e["calls"].get<double>());
}

void run(const BenchOptions& options) {
  if (options.threads > 0) set_num_threads(options.threads);
  const auto wants = [&](const char* part) {
    return std::find(options.parts.begin(), options.parts.end(), part) != options.parts.end();
  };
  const Usage before = Usage::read();
  const double begin = bench::now();
  json result{{"threads", num_threads()}, {"isa", isa_name(cpu_isa())}, {"version", SLUICE_VERSION}};

  bench::Peak peak;
  if (wants("peak")) {
    peak = bench::measure_peak(0.3);
    fmt::print("FMA peak ({}, f32)   {:>8.1f} GFLOP/s on 1 thread{:>9.1f} on {}\n", isa_name(cpu_isa()),
               peak.fma_one_thread, peak.fma, num_threads());
    fmt::print("memory              {:>8.1f} GB/s copy{:>9.1f} GB/s triad (read + written)\n\n", peak.copy, peak.triad);
    result["peak"] = {{"fma_one_thread_gflops", peak.fma_one_thread},
                      {"fma_gflops", peak.fma},
                      {"copy_gb_per_second", peak.copy},
                      {"triad_gb_per_second", peak.triad}};
  }
  const auto dtype = [](const std::string& name) { return name == "bf16" ? DType::bf16 : DType::f32; };
  if (wants("ops")) {
    fmt::print("{:<32}{:<6}{:<26}{:>11}{:>10}{:>8}{:>9}\n", "op", "", "shape", "us", "GFLOP/s", "% peak", "GB/s");
    for (const std::string& precision : options.precisions) {
      const double fma = bench::fma_peak(num_threads(), 0.2);
      const json rows = bench::measure_ops(dtype(precision), fma, options.seconds > 0 ? options.seconds : 0.1);
      for (const json& row : rows) {
        fmt::print("{:<32}{:<6}{:<26}{:>11.1f}{:>10}{:>8}{:>9}\n", row["op"].get<std::string>(), precision,
                   row["shape"].get<std::string>(), row["us"].get<double>(), number(row, "gflops", "{:.1f}"),
                   number(row, "percent_of_peak", "{:.1f}"), number(row, "gb_per_second", "{:.1f}"));
        result["ops"].push_back(row);
      }
      std::fflush(stdout);
    }
    fmt::print("\n");
  }
  if (wants("step"))
    for (const std::string& model : options.models)
      for (const std::string& precision : options.precisions) {
        const json row = bench::measure_step(model, dtype(precision), options.seconds > 0 ? options.seconds : 5, options.profile);
        print_step(row);
        std::fflush(stdout);
        result["steps"].push_back(row);
      }

  const Usage after = Usage::read();
  const double elapsed = bench::now() - begin;
  const double others = std::max(0.0, (after.machine - before.machine) - (after.own - before.own)) / elapsed;
  result["other_processes_cores"] = others;
  if (others > 0.05)
    fmt::print("\nnote: other processes used {:.2f} cores meanwhile; these figures are lower than the machine's best\n", others);
  if (!options.json_file.empty()) io::write_file_atomic(options.json_file, result.dump(2) + "\n");
}

}  // namespace

void add_bench_command(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand("bench", "speed of this machine, of single operations and of whole training steps");
  auto options = std::make_shared<BenchOptions>();
  command->add_option("--part", options->parts, "peak, ops, step; all by default")
      ->delimiter(',')
      ->check(CLI::IsMember({"peak", "ops", "step"}));
  command->add_option("--model", options->models, "models to train a few steps of")
      ->delimiter(',')
      ->check(CLI::IsMember(bench::model_names()));
  command->add_option("--precision", options->precisions, "f32, bf16; both by default")
      ->delimiter(',')
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_option("--threads", options->threads, "threads; 0: as OMP_NUM_THREADS says")->check(CLI::NonNegativeNumber);
  command->add_option("--seconds", options->seconds, "time for each measurement; 0: 0.1 per op, 5 per model")
      ->check(CLI::NonNegativeNumber);
  command->add_flag("--profile", options->profile, "where a step's time goes, op by op");
  command->add_option("--json", options->json_file, "also write every number to this file")->type_name("FILE");
  command->footer(
      "Examples:\n  sluice bench\n  sluice bench --part step --model qwen,qwen-headwise --precision f32 --profile\n"
      "FLOPs per token are 6 x matrix parameters + 6 x layers x sequence x heads x head_dim. Steps are medians, ops the best.");
  command->callback([options] { run(*options); });
}

}  // namespace sluice
