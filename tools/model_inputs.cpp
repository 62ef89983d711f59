#include "model_inputs.h"

#include <spdlog/fmt/fmt.h>

#include "checkpoint/manifest.h"
#include "config/derived.h"
#include "core/io.h"
#include "data/loader.h"
#include "run/start_facts.h"

namespace sluice {
namespace {

/// The contents of a checkpoint, or of a folder of another program.
void state_weights(StartFacts& facts, const ModelFiles& files) {
  if (io::exists(files.path + "/" + kManifestName)) {
    facts.set("the checkpoint", fmt::format("step {}, {}", files.step, weights_fingerprint(files.path)),
              ExitCode::data);
    return;
  }
  facts.set("the config.json of the model", "xxh3:" + checksum(io::read_file(files.path + "/config.json")),
            ExitCode::data);
  facts.set("the weights of the model", weights_fingerprint(files.path), ExitCode::data);
}

}  // namespace

ModelInputs read_model(StartFacts& facts, const Communicator& ranks, const std::string& command,
                       const std::string& path, const OpenOptions& how) {
  state_program(facts);
  ModelInputs inputs{open_model(path, how), {}};
  inputs.config = inputs.files.config;
  const Config& config = inputs.config;
  if (config.parallel.context > 1 && resolve_device(config.train.device) != Device::cpu)
    fail(ExitCode::usage,
         "parallel.context = {}: sluice {} shares sequences between ranks on CPUs only; add --device cpu",
         config.parallel.context, command);
  if (ranks.size() == 1) return inputs;
  Config trained = config;
  trained.run_dir = std::string("/");  // it does not matter where the run is
  state_configuration(facts, trained);
  state_device(facts, config);
  state_weights(facts, inputs.files);
  facts.set("the tokenizer", inputs.files.tokenizer->fingerprint(), ExitCode::data);
  return inputs;
}

void state_sets(StartFacts& facts, const std::vector<DataSource>& sets, const Config& config) {
  std::vector<std::string> names;
  for (const DataSource& set : sets) names.push_back(set.name);
  facts.set("the validation sets (--set, --data)", fmt::format("{}", fmt::join(names, " ")));
  for (const DataSource& set : sets)
    state_contents(facts, "the contents of the validation set " + set.name, Blend({set}, config));
}

void require_sharing(const Communicator& ranks, const std::string& command, const Config& config) {
  const int64_t context = config.parallel.context;
  if (ranks.size() != context)
    fail(ExitCode::usage,
         "sluice {}: {} rank{} and parallel.context = {}; all ranks share every sample, so that both numbers "
         "have to be equal",
         command, ranks.size(), ranks.size() == 1 ? "" : "s", context);
}

}  // namespace sluice
