// sluice plan: parameters, FLOPs, memory and length of a training, without training; and what it would cost
// on many GPUs.
#include "plan/plan.h"

#include <spdlog/fmt/fmt.h>

#include <memory>

#include "commands.h"
#include "config/load.h"
#include "core/cores.h"
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
  std::vector<int64_t> gpus, expert, zero = {1};
  std::string gradient_dtype = "bf16";
  ScaleAssumptions assumed;
};

/// Every number of GPUs with every layout. A model with experts shares them by 8, 16 and 32 unless it is said
/// how.
std::vector<ScaleRow> scale_rows(const ScaleModel& model, Options& o) {
  if (o.expert.empty())
    o.expert = model.experts > 0 ? std::vector<int64_t>{8, 16, 32} : std::vector<int64_t>{1};
  o.assumed.gradient_bytes = o.gradient_dtype == "f32" ? 4 : 2;
  std::vector<ScaleRow> rows;
  std::string reasons;
  bool possible = false;
  for (const int64_t gpus : o.gpus)
    for (const int64_t expert : o.expert)
      for (const int64_t zero : o.zero) {
        rows.push_back(scale(model, o.assumed, {gpus, expert, zero}));
        possible |= rows.back().refused.empty();
        if (reasons.find(rows.back().refused) == std::string::npos) reasons += "\n  " + rows.back().refused;
      }
  if (!possible) fail(ExitCode::usage, "--gpus: none of these layouts can be{}", reasons);
  return rows;
}

void add_scale_options(Command& plan, Options& o) {
  const std::string group = "On many GPUs (expected, not measured)";
  const auto option = [&](const char* name, auto& value, const char* help) {
    return plan.add_option(name, value, help)->group(group);
  };
  option("--gpus", o.gpus, "numbers of GPUs to expect a step's cost on: 64,128,256")
      ->delimiter(',')
      ->allow_extra_args(false);
  option("--expert-parallel", o.expert, "GPUs that share the experts (8,16,32; without experts 1)")
      ->delimiter(',')
      ->allow_extra_args(false);
  option("--zero", o.zero, "ZeRO stages, 0 to 3 (1)")->delimiter(',')->allow_extra_args(false);
  option("--gradient-dtype", o.gradient_dtype, "how gradients travel: bf16 (the default) or f32")
      ->one_of({"bf16", "f32"});
  ScaleAssumptions& a = o.assumed;
  option("--peak-tflops", a.peak_tflops, "of a GPU (989: H100, bf16)");
  option("--gpu-mfu", a.gpu_mfu, "share of it that a GPU reaches alone (0.42)");
  option("--gpu-memory", a.memory_gib, "GiB of a GPU (79.6)");
  option("--gpus-per-node", a.gpus_per_node, "(8)");
  option("--nvlink", a.nvlink_gb_s, "GB/s of a GPU inside its node, each way, achieved (330)");
  option("--nic", a.nic_gb_s, "GB/s of a GPU to other nodes, each way, achieved (45)");
  option("--hop", a.hop_us, "microseconds until an all-to-all flows, per hop (60)");
  option("--hidden-backward", a.hidden_backward,
         "share of a backward pass beside which gradients are exchanged (0.85)");
  option("--hidden-forward", a.hidden_forward,
         "share of a forward pass beside which weights are gathered (0.85)");
  option("--hidden-all-to-all", a.hidden_all_to_all, "share of an all-to-all that hides (0.75)");
}

}  // namespace

void add_plan_command(Command& app, int&) {
  const auto options = std::make_shared<Options>();
  Command* plan = app.add_subcommand("plan", "Parameters, FLOPs, memory and steps; nothing is trained");
  plan->add_option("CONFIG", options->file, "configuration")->required();
  plan->add_option("key=value", options->overrides, "overrides");
  plan->add_option("--ranks", options->ranks,
                   "memory of each of so many ranks (mpirun -n); none has to be there");
  plan->add_flag("--json", options->json, "machine-readable");
  add_scale_options(*plan, *options);
  plan->footer(
      "Examples:\n  sluice plan configs/quickstart/gated.yaml\n"
      "  sluice plan configs/models/moe_15a2b.yaml train.recompute=mlp\n"
      "  sluice plan configs/models/small_384.yaml --ranks 4\n"
      "  sluice plan configs/gated_attention/base_15a2b.yaml --gpus 64,256,512,1024 --expert-parallel "
      "8,16,32");
  plan->callback([options] {
    const Config config = load_config(options->file, options->overrides);
    use_threads(config.train.threads);  // work memory depends on them
    const Plan result = make_plan(config, options->ranks);
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
      const ScaleModel model = scale_model(result);
      const std::vector<ScaleRow> rows = scale_rows(model, *options);
      if (options->json)
        json["scale"] = scale_json(model, options->assumed, rows);
      else
        text += scale_text(model, options->assumed, rows);
    }
    fmt::print("{}", options->json ? json.dump(2) + "\n" : text);
  });
}

}  // namespace sluice
