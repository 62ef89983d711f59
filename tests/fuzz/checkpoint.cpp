// A checkpoint whose checksums are made right after the mutation (support/stored.h), so that what it says is
// tested: manifest, state.json, config.yaml, config.json, headers, index. And the same folder as one of
// weights from another program, without its manifest.
#include <memory>

#include "checkpoint/compare.h"
#include "checkpoint/manifest.h"
#include "checkpoint/state_reader.h"
#include "checkpoint/store.h"
#include "checkpoint/stored_tensors.h"
#include "config/model_function.h"
#include "hf/config.h"
#include "run/divergence.h"
#include "run/router_monitor.h"
#include "support/config_checks.h"
#include "support/stored.h"
#include "train/step_policy.h"

namespace sluice::fuzz {
namespace {

constexpr const char* kFolder = "step_00000010";

/// The tensors of the model of the seeds.
class Model {
 public:
  Model() {
    add(weights_, "model.embed_tokens.weight", {6, 4});
    add(weights_, "model.layers.0.mlp.up_proj.weight", {2, 4});
    for (const char* suffix : {".m", ".v"}) {
      add(moments_, std::string("model.embed_tokens.weight") + suffix, {6, 4});
      add(moments_, std::string("model.layers.0.mlp.up_proj.weight") + suffix, {2, 4});
    }
  }
  const std::vector<NamedTensor>& weights() const { return weights_; }
  const std::vector<NamedTensor>& moments() const { return moments_; }

 private:
  void add(std::vector<NamedTensor>& list, const std::string& name, std::initializer_list<int64_t> shape) {
    Tensor tensor(nullptr, DType::f32, shape);
    memory_.emplace_back(new char[static_cast<size_t>(tensor.bytes())]);
    tensor.data = memory_.back().get();
    list.push_back({name, tensor});
  }
  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<NamedTensor> weights_, moments_;
};

/// What a training takes from state.json, and some steps from there.
void restore(const CheckpointInfo& checkpoint) {
  const StateReader state(checkpoint.state, checkpoint.path + "/state.json");
  const int64_t step = state.integer("step", 0, int64_t{1} << 40);
  for (const char* key : {"samples", "tokens"})
    if (state.has(key)) state.integer(key, 0);
  state.integer("adam_steps", 0, step);
  for (const BadStepPolicy on_bad : {BadStepPolicy::skip, BadStepPolicy::count, BadStepPolicy::stop}) {
    TrainConfig config;
    config.on_spike = on_bad;
    StepPolicy policy(config, 5.5);
    policy.restore(state.object("policy"), step);
    const nlohmann::json before = policy.state();
    for (int64_t i = 1; i < 20; ++i)
      policy.decide(step + i, i % 5 == 0 ? 1e30 : 2.5, i % 7 == 0 ? 1e30 : 1.0);
    StepPolicy again(config, 5.5);
    must("the policy's state is refused when it is restored again", [&] {
      const StateReader reader(before, "state.json");
      again.restore(reader, step);
    });
    expect(again.state() == before, "the policy's state changes when it is saved and restored");
  }
  if (state.has("divergence")) {
    Divergence divergence(1.5, 5.5, 10);
    divergence.restore(state.object("divergence"));
    const nlohmann::json before = divergence.state();
    Divergence again(1.5, 5.5, 10);
    must("the divergence's state is refused when it is restored again",
         [&] { again.restore(StateReader(before, "state.json")); });
    expect(again.state() == before, "the divergence's state changes when it is saved and restored");
    for (int64_t i = 1; i < 300; ++i) divergence.add(step + i, i < 200 ? 2.5 : 9.0);
  }
  ModelConfig model;
  model.num_hidden_layers = 1;
  model.moe.num_experts = 2;
  model.moe.num_experts_per_tok = 1;
  RouterMonitor monitor(model);
  monitor.restore(state);
  nlohmann::json saved, again;
  monitor.save(saved);
  must("the routers' state is refused when it is restored again", [&] {
    RouterMonitor second(model);
    second.restore(StateReader(saved, "state.json"));
    second.save(again);
  });
  expect(again == saved, "the routers' state changes when it is saved and restored");
  RouterSummary summary;
  summary.layers.resize(1);
  for (int64_t i = 1; i < 5; ++i) monitor.add(step + i, summary);
  for (const char* key : {"data_fingerprint", "tokenizer_fingerprint"})
    if (state.has(key)) state.text(key);
  if (state.has("seconds")) state.number("seconds", 0);
  if (state.has("loss")) state.number("loss");
}

void read_checkpoint() {
  CheckpointInfo info;
  const bool sound = attempt([&] { info = verify_checkpoint(kFolder); });
  attempt([&] {
    const CheckpointInfo newest = newest_valid_checkpoint(".");
    expect(sound == !newest.path.empty(), "a checkpoint is valid alone, and not as the newest");
  });
  attempt([&] {
    const Manifest manifest = read_manifest(kFolder);
    write("again.json", manifest.text());
    must("a manifest that was written is refused", [&] {
      expect(read_manifest_file("again.json").text() == manifest.text(), "a manifest changes in writing");
    });
    coverage_problems(manifest);
  });
  const Model model;
  attempt([&] { load_checkpoint(kFolder, model.weights(), model.moments()); });
  attempt([&] { load_weights(kFolder, model.weights()); });
  attempt([&] {
    const Comparison same = compare_checkpoints(kFolder, kFolder);
    for (const TensorDifference& d : same.differences)
      expect(!d.problem.empty(), "a tensor differs from itself: " + d.name);
  });
  if (!sound) return;
  attempt([&] { restore(info); });
  attempt([&] {
    const Config config = load_resolved_config(info.path + "/config.yaml", {"train.device=auto"});
    check_accepted(config);
    config_changes(config, Config{});
  });
  attempt([&] { function_differences(read_hf_config(info.path + "/config.json").model, ModelConfig{}); });
}

void read_folder() {
  const Model model;
  attempt([&] { load_weights("hf", model.weights()); });
  attempt([&] {
    const Comparison same = compare_checkpoints("hf", "hf");
    for (const TensorDifference& d : same.differences)
      expect(!d.problem.empty(), "a tensor differs from itself: " + d.name);
  });
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::clear();
  fuzz::Files files = fuzz::completed(fuzz::split(fuzz::text_of(data, size)));
  fuzz::write_all(files, fuzz::kFolder);
  std::erase_if(files, [](const auto& file) { return file.first == kManifestName; });
  fuzz::write_all(files, "hf");
  fuzz::read_checkpoint();
  fuzz::read_folder();
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::mutated_archive(text, most, random))
