// sluice plan: parameters, FLOPs, memory and length of a training, without training.
#include "train/plan.h"

#include <spdlog/fmt/fmt.h>

#include <memory>

#include "commands.h"
#include "config/load.h"

namespace sluice {

void add_plan_command(CLI::App& app, int&) {
  struct Options {
    std::string file;
    std::vector<std::string> overrides;
    bool json = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* plan = app.add_subcommand("plan", "Parameters, FLOPs, memory and steps; nothing is trained");
  plan->add_option("CONFIG", options->file, "configuration")->required();
  plan->add_option("key=value", options->overrides, "overrides");
  plan->add_flag("--json", options->json, "machine-readable");
  plan->footer(
      "Examples:\n  sluice plan configs/quickstart/gated.yaml\n"
      "  sluice plan configs/models/moe_15a2b.yaml train.recompute=mlp\n"
      "  sluice plan configs/models/dense_1.7b_28l.yaml train.micro_batch_size=1 train.recompute=block");
  plan->callback([options] {
    const Plan result = make_plan(load_config(options->file, options->overrides));
    fmt::print("{}", options->json ? plan_json(result).dump(2) + "\n" : plan_text(result));
  });
}

}  // namespace sluice
