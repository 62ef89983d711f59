#pragma once
// A folder with data and a configuration that trains in well under a second.
#include "support/tiny_training.h"
#include "tools/program.h"

namespace sluice::test {

inline nlohmann::json status_of(const std::string& run) {
  return nlohmann::json::parse(io::read_file(run + "/status.json"));
}

inline std::string step_folder(const std::string& run, int64_t step) {
  return fmt::format("{}/ckpt/step_{:08}", run, step);
}

/// How often a text contains a part.
inline int64_t count_of(const std::string& text, const std::string& part) {
  int64_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

struct TinyRun {
  TemporaryFolder folder;
  std::string config = folder / "tiny.yaml", run = folder / "run";

  TinyRun() {
    write_corpus(folder / "train", 5000, 257);
    write_corpus(folder / "held_out", 400, 257);
    write_config("");
  }
  /// The configuration with `more` lines appended.
  void write_config(const std::string& more) const {
    write_bytes(config,
                "name: tiny\n"
                "run_dir: " +
                    run +
                    "\n"
                    "model:\n"
                    "  hidden_size: 16\n"
                    "  num_hidden_layers: 1\n"
                    "  num_attention_heads: 2\n"
                    "  num_key_value_heads: 1\n"
                    "  head_dim: 8\n"
                    "  intermediate_size: 24\n"
                    "  attention: {gates: [{position: sdpa_output}]}\n"
                    "data:\n"
                    "  seq_len: 16\n"
                    "  train: [{name: tiny, path: train}]\n"
                    "  validation: [{name: held_out, path: held_out}]\n"
                    "train: {micro_batch_size: 2, global_batch_size: 2, max_steps: 8, threads: 1}\n"
                    "optimizer: {lr: 1e-2}\n"
                    "checkpoint: {every_steps: 4, every_minutes: 0, async: false}\n"
                    "log: {every_steps: 1, tensorboard: false}\n" +
                    more);
  }
  Outcome sluice(const std::vector<std::string>& arguments,
                 const std::map<std::string, std::string>& environment = {}) const {
    return Program(folder.path, arguments, environment).wait();
  }
  Outcome train(const std::vector<std::string>& more = {},
                const std::map<std::string, std::string>& environment = {}) const {
    return sluice(train_arguments(more), environment);
  }
  std::vector<std::string> train_arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"train", config};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  /// Weights, moments and state of a checkpoint, without times.
  std::string bits(const std::string& run_folder, int64_t step) const {
    const std::string path = step_folder(run_folder, step);
    nlohmann::json state = nlohmann::json::parse(io::read_file(path + "/state.json"));
    state.erase("seconds");
    return io::read_file(path + "/model.safetensors") + io::read_file(path + "/optim.safetensors") +
           state.dump();
  }
  /// Losses and gradient norms of metrics.jsonl, in order, as text.
  std::string curve(const std::string& run_folder) const {
    std::string curve;
    std::ifstream file(run_folder + "/metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto j = nlohmann::json::parse(line);
      curve += fmt::format("{} {} {}\n", j["step"].dump(), j["loss"].dump(), j["grad_norm"].dump());
    }
    return curve;
  }
};

}  // namespace sluice::test
