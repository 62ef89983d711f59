#include "run/data_plan.h"

#include <spdlog/fmt/fmt.h>

#include "core/error.h"
#include "run/console.h"

namespace sluice {

DataPlan plan_data(const Config& config, int64_t steps) {
  DataPlan plan;
  try {
    const Blend data(config.data.train, config);
    const auto epochs = data.epochs(steps * config.train.global_batch_size);
    const auto sources = data.sources();
    for (size_t s = 0; s < sources.size(); ++s) plan.sources.push_back({sources[s], epochs[s].second});
  } catch (const Error& error) {
    plan.problem = error.what();
  }
  return plan;
}

std::string data_plan_text(const DataPlan& plan) {
  if (!plan.problem.empty()) return fmt::format("\ndata\n  not read: {}\n", plan.problem);
  std::string out = "\ndata\n";
  for (const auto& [info, epochs] : plan.sources)
    out += fmt::format("  {:<24} {:>22}{}  {:.0f}% of the samples, {:.2f} epochs{}\n", info.name,
                       format_count(static_cast<double>(info.tokens)) + " tokens", info.describe_untrained(),
                       100 * info.weight, epochs,
                       epochs > kManyEpochs ? fmt::format(": more than {:g}", kManyEpochs) : "");
  return out;
}

nlohmann::json data_plan_json(const DataPlan& plan) {
  nlohmann::json sources = nlohmann::json::array();
  for (const auto& [info, epochs] : plan.sources)
    sources.push_back({{"name", info.name},
                       {"files", info.files},
                       {"tokens", info.tokens},
                       {"unread_tokens", info.untrained},
                       {"files_without_sample", info.files_untrained},
                       {"share", info.weight},
                       {"epochs", epochs}});
  return {{"sources", sources},
          {"problem", plan.problem.empty() ? nlohmann::json() : nlohmann::json(plan.problem)}};
}

std::vector<std::string> data_warnings(const Blend& data, int64_t samples) {
  std::vector<std::string> warnings;
  for (const Blend::SourceInfo& info : data.sources()) {
    if (info.files_untrained == 0) continue;
    // Packed documents are left out only where they are one token long, since nothing is predicted in them.
    warnings.push_back(fmt::format(
        "data source {}: {} of {} files {} without a sample, so they are never trained on: {}", info.name,
        info.files_untrained, info.files, info.files_untrained == 1 ? "is" : "are",
        info.padding ? "their documents are one token each"
                     : "they are too short for one of data.seq_len tokens; make one token file of several "
                       "texts (sluice tokenize a.txt b.txt), lower data.seq_len, or set "
                       "data.packing=documents"));
  }
  for (const auto& [name, epochs] : data.epochs(samples))
    if (epochs > kManyEpochs)
      warnings.push_back(fmt::format(
          "data source {} is repeated for {:.1f} epochs; beyond about {:g} epochs repeated text adds little: "
          "train for fewer steps, give it less weight, or add text",
          name, epochs, kManyEpochs));
  return warnings;
}

}  // namespace sluice
