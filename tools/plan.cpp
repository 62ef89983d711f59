// sluice plan: parameters, FLOPs, memory and length of a run without training, and its expected cost on many
// GPUs.
#include "plan/plan.h"

#include <spdlog/fmt/fmt.h>

#include <limits>
#include <memory>

#include "commands.h"
#include "config/fields.h"
#include "config/idle_settings.h"
#include "config/load.h"
#include "core/cores.h"
#include "core/error.h"
#include "plan/cost_model.h"
#include "run/data_plan.h"
#include "run/limits_check.h"

namespace sluice {
namespace {

struct Options {
  std::string file;
  std::vector<std::string> overrides;
  int64_t ranks = 1;
  bool json = false;
  std::vector<int64_t> gpus, expert, zero = {1}, context = {1};
  std::string gradient_dtype = "bf16";
  ScaleAssumptions assumed;
  Option* peak = nullptr;
  std::vector<std::pair<std::string, Option*>> of_gpus;  // options that need --gpus
};

/// Every number of GPUs combined with every layout. The default expert-parallel sizes of an MoE model are 8,
/// 16 and 32.
std::vector<ScaleRow> scale_rows(const ScaleModel& model, Options& o) {
  if (o.expert.empty())
    o.expert = model.experts > 0 ? std::vector<int64_t>{8, 16, 32} : std::vector<int64_t>{1};
  o.assumed.gradient_bytes = o.gradient_dtype == "f32" ? 4 : 2;
  std::vector<ScaleRow> rows;
  std::string reasons;
  bool possible = false;
  for (const int64_t gpus : o.gpus)
    for (const int64_t expert : o.expert)
      for (const int64_t context : o.context)
        for (const int64_t zero : o.zero) {
          rows.push_back(scale(model, o.assumed, {gpus, expert, zero, context}));
          possible |= rows.back().refused.empty();
          if (reasons.find(rows.back().refused) == std::string::npos) reasons += "\n  " + rows.back().refused;
        }
  if (!possible) fail(ExitCode::usage, "--gpus: none of these layouts is possible{}", reasons);
  return rows;
}

void add_scale_options(Command& plan, Options& o) {
  const std::string group = "On many GPUs (expected, not measured)";
  const auto option = [&](const char* name, auto& value, const char* help) {
    Option* added = plan.add_option(name, value, help)->group(group);
    if (name != std::string("--gpus")) o.of_gpus.emplace_back(name, added);
    return added;
  };
  option("--gpus", o.gpus, "numbers of GPUs for which to estimate the cost of a step: 64,128,256")
      ->delimiter(',')
      ->allow_extra_args(false);
  option("--expert-parallel", o.expert, "expert-parallel sizes (8,16,32; without experts 1)")
      ->delimiter(',')
      ->allow_extra_args(false);
  option("--context-parallel", o.context, "context-parallel sizes: GPUs that share every sequence (1)")
      ->delimiter(',')
      ->allow_extra_args(false);
  option("--zero", o.zero, "ZeRO stages, 0 to 3 (1)")->delimiter(',')->allow_extra_args(false);
  option("--gradient-dtype", o.gradient_dtype, "type of gradients in transit: bf16 (the default) or f32")
      ->one_of({"bf16", "f32"});
  ScaleAssumptions& a = o.assumed;
  o.peak = option("--peak-tflops", a.peak_tflops, "peak TFLOP/s of a GPU (989: H100, bf16)");
  option("--gpu-mfu", a.gpu_mfu, "fraction of the peak that a single GPU achieves (0.42)");
  option("--gpu-memory", a.memory_gib, "memory of a GPU in GiB (79.6)");
  option("--gpus-per-node", a.gpus_per_node, "(8)");
  option("--nvlink", a.nvlink_gb_s, "achieved GB/s of a GPU within its node, each way (330)");
  option("--nic", a.nic_gb_s, "achieved GB/s of a GPU to other nodes, each way (45)");
  option("--hop", a.hop_us,
         "start-up latency of an all-to-all, or of keys or values, in microseconds, per hop (60)");
  option("--hidden-backward", a.hidden_backward,
         "fraction of the backward pass that gradient reduction can overlap (0.85)");
  option("--hidden-forward", a.hidden_forward,
         "fraction of the forward pass that the all-gather of weights can overlap (0.85)");
  option("--hidden-all-to-all", a.hidden_all_to_all,
         "fraction of an all-to-all that is hidden behind computation (0.75)");
  option("--hidden-context", a.hidden_context,
         "fraction of the all-gathers of keys and values that is hidden behind computation (0.5)");
}

}  // namespace

void add_plan_command(Command& app, int&) {
  const auto options = std::make_shared<Options>();
  Command* plan = app.add_subcommand("plan", "Parameters, FLOPs, memory and steps; nothing is trained");
  plan->add_option("CONFIG", options->file, "configuration")->required();
  plan->add_option("key=value", options->overrides, "overrides");
  plan->add_option("--ranks", options->ranks,
                   "plan the memory of each of this many ranks (mpirun -n), which need not exist")
      ->between(1, std::numeric_limits<int>::max());
  plan->add_flag("--json", options->json, "machine-readable");
  add_scale_options(*plan, *options);
  plan->footer(
      "Examples:\n  sluice plan configs/quickstart/gated.yaml\n"
      "  sluice plan configs/models/moe_15a2b.yaml train.recompute=mlp\n"
      "  sluice plan configs/models/small_384.yaml --ranks 4\n"
      "  sluice plan configs/gated_attention/base_15a2b.yaml --gpus 64,256,512,1024 --expert-parallel "
      "8,16,32\n"
      "  sluice plan configs/long_context/gate_32k.yaml --gpus 64 --context-parallel 1,4,8");
  plan->callback([options] {
    for (const auto& [name, given] : options->of_gpus)
      if (options->gpus.empty() && given->given())
        fail(ExitCode::usage,
             "{} has no effect without --gpus, the numbers of GPUs to estimate for; a run's own layout is "
             "parallel.* with --ranks",
             name);
    KeyPlaces places;
    const Config config = load_config(options->file, options->overrides, &places, {.ranks = options->ranks});
    use_threads(config.train.threads);  // workspace depends on it
    const Plan result = make_plan(config, options->ranks, places);
    nlohmann::json json = options->json ? plan_json(result) : nlohmann::json();
    std::string text = options->json ? "" : plan_text(result) + limits_text(result);
    if (options->json) json["limits"] = limits_json(result);
    if (result.steps > 0 && !config.data.train.empty()) {
      const DataPlan data = plan_data(result.config, result.steps);
      if (options->json)
        json["data"] = data_plan_json(data);
      else
        text += data_plan_text(data);
    }
    if (!options->gpus.empty()) {
      if (const Precision precision = config.train.precision;
          precision != Precision::bf16 && !options->peak->given())
        fail(ExitCode::usage,
             "--gpus: train.precision is {}, and the assumed peak of a GPU is that of bf16; give the peak of "
             "{} with --peak-tflops, or set train.precision=bf16",
             enum_name(precision), enum_name(precision));
      const ScaleModel model = scale_model(result, options->context);
      const std::vector<ScaleRow> rows = scale_rows(model, *options);
      if (options->json)
        json["scale"] = scale_json(model, options->assumed, rows);
      else
        text += scale_text(model, options->assumed, rows);
    }
    const std::vector<std::string> idle = idle_settings(config, places, options->file);
    if (options->json) json["warnings"] = idle;
    for (size_t i = 0; i < idle.size(); ++i)
      text += fmt::format("{}  {}\n", i == 0 ? "\nwarnings\n" : "", idle[i]);
    fmt::print("{}", options->json ? json.dump(2) + "\n" : text);
  });
}

}  // namespace sluice
