// sluice bench: speed of the machine, of single ops and of whole training steps, in one run.
#include "bench/bench.h"

#include <spdlog/fmt/fmt.h>
#include <sys/resource.h>

#include <fstream>
#include <memory>
#include <sstream>

#include "commands.h"
#include "core/build_info.h"
#include "core/cpu_features.h"
#include "core/device.h"
#include "core/io.h"
#include "core/parallel_for.h"

namespace sluice {
namespace {

using nlohmann::json;

struct BenchOptions {
  std::vector<std::string> parts, models, precisions;  // empty: the device's own
  std::string device = "auto", size = "full";
  double seconds = 0;
  int threads = 0;
  int64_t longest = 32768;
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
    const auto seconds = [](const timeval& t) {
      return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    u.own = seconds(own.ru_utime) + seconds(own.ru_stime);
    return u;
  }
};

std::string number(const json& row, const char* key, const char* format) {
  return row.contains(key) ? fmt::format(fmt::runtime(format), row[key].get<double>()) : "";
}

/// Utilisation is relative to the peak of FMA, or of products of bf16, measured between the steps on a CPU,
/// and to 989 TFLOP/s on a GPU (H100 and H200, dense bf16).
void print_step(const json& row) {
  fmt::print(
      "{:<18}{:<6}{:>9.1f} ms{:>10.0f} tokens/s{:>9.1f} GFLOP/s{:>7.1f} % of {}   ({:.1f} M parameters)\n",
      row["model"].get<std::string>(), row["precision"].get<std::string>(), row["ms"].get<double>(),
      row["tokens_per_second"].get<double>(), row["gflops"].get<double>(),
      row["percent_of_peak"].get<double>(), row["peak"].get<std::string>(),
      row["parameters"].get<double>() * 1e-6);
  if (!row.contains("profile")) return;
  for (const json& e : row["profile"])
    if (e["percent"].get<double>() >= 0.1)
      fmt::print("    {:<34}{:>9.2f} ms{:>7.1f} %{:>7.0f} calls\n", e["op"].get<std::string>(),
                 e["ms"].get<double>(), e["percent"].get<double>(), e["calls"].get<double>());
}

/// Rows of a race: name, median, rate, and the ratio to a plain copy, to a library or to a dense layer.
void print_race(const char* part, const json& rows) {
  fmt::print("{}\n", part);
  for (const json& row : rows) {
    std::string name = row["name"].get<std::string>();
    for (const char* key : {"shape", "tokens", "width", "experts", "heads", "depth", "gate", "with",
                            "precision", "kernel", "algorithm"})
      if (row.contains(key))
        name += " " + (row[key].is_string() ? row[key].get<std::string>() : row[key].dump());
    if (row.contains("neighbours"))
      name += fmt::format(", k {}, neighbours {} ({:.1f} k)", row["k"].get<int64_t>(),
                          row["neighbours"].get<std::string>(), row["union_of_8_over_keys"].get<double>());
    if (row.contains("skipped")) {
      fmt::print("  {:<72} skipped: {}\n", name, row["skipped"].get<std::string>());
      continue;
    }
    fmt::print("  {:<72}{:>11.1f} us{}{}{}{}{}{}{}\n", name, row["us"].get<double>(),
               number(row, "tflops", "{:>9.2f} TFLOP/s"), number(row, "tb_per_second", "{:>8.3f} TB/s"),
               number(row, "percent_of_copy", "{:>7.1f} % of copy"),
               number(row, "of_cudnn", "{:>7.2f} x cuDNN"), number(row, "of_dense", "{:>7.3f} x dense"),
               number(row, "of_heuristic", "{:>7.3f} x heuristic"),
               number(row, "of_onednn", "{:>7.2f} x oneDNN"));
  }
  fmt::print("\n");
  std::fflush(stdout);
}

void print_check(const json& rows) {
  for (const json& row : rows)
    if (!row.contains("skipped"))
      fmt::print("attention, {} tokens, head_dim {}, gate {}: {:<7} {}, {}\n", row["tokens"].get<int64_t>(),
                 row["depth"].get<int64_t>(), row["gate"].get<std::string>(),
                 row["kernel"].get<std::string>(),
                 row.contains("reference")
                     ? std::string("is the reference")
                     : fmt::format("differs by {:.1e}, most in {}", row["difference"].get<double>(),
                                   row["of"].get<std::string>()),
                 row["same_bits"].get<bool>() ? "same bits twice" : "other bits in a second run");
  fmt::print("\n");
  std::fflush(stdout);
}

void print_ranks(const json& rows) {
  fmt::print(
      "ranks: median (smallest to largest), then milliseconds: of both variants, of link and step, or of "
      "stall and step\n");
  for (const json& row : rows)
    fmt::print("  {:<56}{:>7.3f}  ({:.3f} to {:.3f}){:>10.1f} ms{:>10.1f} ms\n",
               row["what"].get<std::string>(), row["median"].get<double>(), row["least"].get<double>(),
               row["most"].get<double>(), row["first_ms"].get<double>(), row["second_ms"].get<double>());
  fmt::print("\n");
  std::fflush(stdout);
}

void print_decode(const json& rows) {
  fmt::print(
      "decode: tokens/s of a prompt, and behind it of one sequence and of several at once; bytes of weights, "
      "keys and values that a step reads over its time, beside a copy's (read and written)\n");
  for (const json& row : rows)
    fmt::print(
        "  {:<7}{:<5}{:>6} tokens{:>7.0f} prompt/s{:>7.1f} one/s{:>11}{:>8.1f} of {}/s{:>11}{:>7.1f} "
        "copy{:>8.1f} MB of "
        "keys and values,{:>8.1f} MB of activations\n",
        row["model"].get<std::string>(), row["precision"].get<std::string>(), row["length"].get<int64_t>(),
        row["prefill_tokens_per_second"].get<double>(), row["decode_tokens_per_second"].get<double>(),
        number(row, "decode_gb_per_second", "{:.1f} GB/s"),
        row["decode_tokens_per_second_together"].get<double>(), row["together"].get<int64_t>(),
        number(row, "decode_gb_per_second_together", "{:.1f} GB/s"), row["copy_gb_per_second"].get<double>(),
        row["cache_bytes_per_sequence"].get<double>() * 1e-6, row["activation_bytes"].get<double>() * 1e-6);
  fmt::print("\n");
  std::fflush(stdout);
}

Device device_of(const std::string& name) {
  if (name == "cpu") return Device::cpu;
  if (name == "auto") return automatic_device();
  if (!built_with_cuda()) fail(ExitCode::usage, "bench: --device cuda: this program has no CUDA backend");
  if (cuda_devices().empty()) fail(ExitCode::usage, "bench: --device cuda: no GPU");
  return Device::cuda;
}

DType dtype_of(const std::string& precision) { return precision == "bf16" ? DType::bf16 : DType::f32; }

/// Fills in what was not chosen.
void choose_defaults(BenchOptions& options, bool gpu) {
  const auto otherwise = [&](std::vector<std::string>& chosen, std::vector<std::string> cpu,
                             std::vector<std::string> cuda) {
    if (chosen.empty()) chosen = gpu ? std::move(cuda) : std::move(cpu);
  };
  otherwise(options.parts, {"peak", "ops", "moe", "step"}, {"kernels", "matmul", "attention", "moe", "step"});
  otherwise(options.models, {"small", "qwen", "qwen-elementwise", "qwen-moe"},
            {"1.7b", "1.7b-headwise", "1.7b-elementwise", "moe-slice"});
  otherwise(options.precisions, {"f32", "bf16"}, {"bf16"});
}

/// What is measured on, for the file of results; the name of a GPU is printed.
json describe(Device device) {
  json result{{"device", device_name(device)}, {"version", build_info().version}};
  if (device == Device::cuda) {
    const DeviceInfo card = cuda_devices()[0];
    result["card"] = card.name, result["compute_capability"] = card.compute_capability,
    result["emulated"] = card.emulated;
    fmt::print("{}\n\n", card.name);
  } else {
    result["threads"] = num_threads(), result["isa"] = isa_name(cpu_isa()),
    result["bf16_products"] = bf16_unit_name(bf16_unit());
  }
  return result;
}

json run_peak() {
  const bench::Peak peak = bench::measure_peak(0.3);
  fmt::print("FMA peak ({}, f32)   {:>8.1f} GFLOP/s on 1 thread{:>9.1f} on {}\n", isa_name(cpu_isa()),
             peak.fma_one_thread, peak.fma, num_threads());
  const auto bf16 = [](const char* unit, double one_thread, double all) {
    if (all > 0)
      fmt::print("bf16 peak ({:<11}) {:>8.1f} GFLOP/s on 1 thread{:>9.1f} on {}\n", unit, one_thread, all,
                 num_threads());
  };
  bf16("avx512_bf16", peak.bf16_one_thread, peak.bf16);
  bf16("amx", peak.amx_one_thread, peak.amx);
  fmt::print("products of bf16 in {}\n", bf16_unit_name(bf16_unit()));
  fmt::print("memory              {:>8.1f} GB/s copy{:>9.1f} GB/s triad (read + written)\n\n", peak.copy,
             peak.triad);
  return {{"fma_one_thread_gflops", peak.fma_one_thread},
          {"fma_gflops", peak.fma},
          {"bf16_one_thread_gflops", peak.bf16_one_thread},
          {"bf16_gflops", peak.bf16},
          {"amx_one_thread_gflops", peak.amx_one_thread},
          {"amx_gflops", peak.amx},
          {"copy_gb_per_second", peak.copy},
          {"triad_gb_per_second", peak.triad}};
}

json run_ops(const std::vector<std::string>& precisions, bool tiny, double seconds) {
  json all;
  for (const std::string& precision : precisions) {
    const bench::ProductsPeak peak(dtype_of(precision));
    const double gflops = peak.measure(0.2);
    fmt::print("{:<32}{:<6}{:<26}{:>11}{:>10}{:>8}{:>9}   of {} {:.1f} GFLOP/s\n", "op", "", "shape", "us",
               "GFLOP/s", "% peak", "GB/s", peak.name(), gflops);
    for (json row : bench::measure_ops(dtype_of(precision), tiny, gflops, seconds)) {
      if (row.contains("percent_of_peak")) row["peak"] = peak.name(), row["peak_gflops"] = gflops;
      fmt::print("{:<32}{:<6}{:<26}{:>11.1f}{:>10}{:>8}{:>9}\n", row["op"].get<std::string>(), precision,
                 row["shape"].get<std::string>(), row["us"].get<double>(), number(row, "gflops", "{:.1f}"),
                 number(row, "percent_of_peak", "{:.1f}"), number(row, "gb_per_second", "{:.1f}"));
      all.push_back(row);
    }
    std::fflush(stdout);
  }
  fmt::print("\n");
  return all;
}

json run_steps(const BenchOptions& options, Device device, double seconds) {
  json all;
  for (const std::string& model : options.models)
    for (const std::string& precision : options.precisions) {
      const json row = bench::measure_step(model, device, dtype_of(precision), seconds, options.profile);
      print_step(row);
      std::fflush(stdout);
      all.push_back(row);
    }
  return all;
}

/// Cores that other processes have used; a note where that was enough to matter.
double note_others(const Usage& before, double begin, bool gpu) {
  const Usage after = Usage::read();
  const double elapsed = bench::now() - begin;
  const double others = std::max(0.0, (after.machine - before.machine) - (after.own - before.own)) / elapsed;
  if (others > 0.05 && !gpu)
    fmt::print(
        "\nnote: other processes used {:.2f} cores during the measurement; these figures are lower than the "
        "machine's "
        "best\n",
        others);
  return others;
}

void run(BenchOptions options) {
  if (options.threads > 0) set_num_threads(options.threads);
  const Device device = device_of(options.device);
  const bool gpu = device == Device::cuda, tiny = options.size == "tiny";
  choose_defaults(options, gpu);
  const auto wants = [&](const char* part) {
    return std::find(options.parts.begin(), options.parts.end(), part) != options.parts.end();
  };
  const auto seconds_or = [&](double usual) { return options.seconds > 0 ? options.seconds : usual; };
  if (gpu && (wants("peak") || wants("ops") || wants("decode")))
    fail(ExitCode::usage,
         "bench: peak, ops and decode measure the CPU; on a GPU: kernels, matmul, attention, moe, sparse, "
         "step");
  const Usage before = Usage::read();
  const double begin = bench::now();
  json result = describe(device);
  if (wants("peak")) result["peak"] = run_peak();
  if (wants("ops")) result["ops"] = run_ops(options.precisions, tiny, seconds_or(0.1));

  const bool quick = options.size == "quick";
  bench::RaceOptions race{device, tiny, quick, seconds_or(quick ? 0.2 : 2), quick ? 11 : 51};
  if (tiny) race.warm_up = 0, race.samples = 3;
  const auto measure = [&](const char* part, const auto& f) {
    if (!wants(part)) return;
    result[part] = f(race);
    print_race(part, result[part]);
  };
  measure("kernels", bench::measure_kernels);
  measure("matmul", bench::measure_matmul);
  if (wants("attention")) print_check(result["attention_check"] = bench::check_attention(race));
  measure("attention", bench::measure_attention);
  std::vector<DType> types;
  for (const std::string& precision : options.precisions) types.push_back(dtype_of(precision));
  measure("moe", [&](const bench::RaceOptions& r) { return bench::measure_moe(r, types); });
  measure("sparse", [&](const bench::RaceOptions& r) {
    return gpu ? bench::measure_sparse_kernels(r, options.longest)
               : bench::measure_sparse(tiny, types, options.longest, seconds_or(0.5));
  });
  if (wants("ranks")) print_ranks(result["ranks"] = bench::measure_ranks(race));
  if (wants("decode"))
    print_decode(result["decode"] = bench::measure_decode(tiny, tiny ? 128 : options.longest));
  if (wants("step")) result["steps"] = run_steps(options, device, seconds_or(tiny ? 0 : 5));

  result["other_processes_cores"] = note_others(before, begin, gpu);
  if (!options.json_file.empty()) io::write_file_atomic(options.json_file, result.dump(2) + "\n");
}

}  // namespace

void add_bench_command(Command& app, int&) {
  Command* command =
      app.add_subcommand("bench", "speed of this machine, of single operations and of whole training steps");
  auto options = std::make_shared<BenchOptions>();
  command
      ->add_option(
          "part,--part", options->parts,
          "measurements; CPU: peak, ops, moe, step, and matmul, ranks, decode and sparse (only if named); "
          "GPU: kernels, matmul, attention, moe, step, and sparse (only if named); default: all")
      ->delimiter(',')
      ->one_of({"peak", "ops", "kernels", "matmul", "attention", "moe", "ranks", "decode", "sparse", "step"});
  command->add_option("--longest", options->longest, "decode, sparse: tokens of the longest prompt (32768)")
      ->between(1024, 1 << 20);
  command->add_option("--device", options->device, "auto, cpu or cuda")->one_of({"auto", "cpu", "cuda"});
  command
      ->add_option(
          "--size", options->size,
          "sizes: full (typical of models on that device), tiny, or, in kernels, matmul, attention, moe and "
          "sparse, quick (few of them, with few turns)")
      ->one_of({"full", "quick", "tiny"});
  command->add_option("--model", options->models, "models of which to train a few steps")
      ->delimiter(',')
      ->one_of(bench::model_names());
  command->add_option("--precision", options->precisions, "f32, bf16; default: both on a CPU, bf16 on a GPU")
      ->delimiter(',')
      ->one_of({"f32", "bf16"});
  command->add_option("--threads", options->threads, "threads; 0: the value of OMP_NUM_THREADS")
      ->not_negative();
  command
      ->add_option("--seconds", options->seconds,
                   "seconds per measurement; 0: 0.1 per op, 5 per model, and 2 of warm-up on a GPU")
      ->not_negative();
  command->add_flag("--profile", options->profile, "print the time of a step per op");
  command->add_option("--json", options->json_file, "also write all results to this file")->type_name("FILE");
  command->footer(
      "Examples:\n  sluice bench\n  sluice bench --part step --model qwen,qwen-headwise --precision f32 "
      "--profile\n"
      "  sluice bench kernels,attention --device cuda --json bench.json\n"
      "FLOPs per token are 6 x matrix parameters + 6 x layers x sequence x heads x head_dim. Steps are "
      "medians, ops the best;\n"
      "kernels, matmul and attention: medians of 51 turns, by the device's clock, on buffers that no cache "
      "of a GPU holds; matmul on a CPU: products of bf16 in turns with oneDNN's.\n"
      "moe: medians of turns taken with the dense network of the same active width. ranks: ratios of step "
      "times, of "
      "ranks that are threads. sparse: a layer of sparse attention beside the same of dense attention.");
  command->callback([options] { run(*options); });
}

}  // namespace sluice
