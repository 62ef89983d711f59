#include "run/start_facts.h"

#include <spdlog/fmt/fmt.h>

#include <filesystem>
#include <set>

#include "checkpoint/manifest.h"
#include "checkpoint/store.h"
#include "comm/collective_errors.h"
#include "config/derived.h"
#include "config/fields.h"
#include "config/paths.h"
#include "core/build_id.h"
#include "core/build_info.h"
#include "core/cpu_features.h"
#include "core/device.h"
#include "core/io.h"
#include "core/parallel_for.h"
#include "data/sample_pages.h"
#include "ops/matmul.h"

namespace sluice {
namespace {

/// Whether a shared library takes part in the computation.
bool computes(const std::string& library) {
  for (const char* name : {"libdnnl.", "libopenblas", "libm.", "libcublas", "libcudnn", "libnccl"})
    if (library.starts_with(name)) return true;
  return false;
}

}  // namespace

std::string weights_fingerprint(const std::string& path) {
  if (!io::is_directory(path)) {
    const io::MappedFile file(path);
    return fmt::format("{} bytes, xxh3:{}", file.size(), checksum(sample_pages(file.data(), file.size())));
  }
  if (const std::string manifest = path + "/" + kManifestName; io::exists(manifest))
    return "manifest xxh3:" + checksum(io::read_file(manifest));
  if (const std::vector<std::string> files = io::glob(path + "/*.safetensors"); !files.empty()) {
    std::string all;
    for (const std::string& file : files) all += weights_fingerprint(file) + "\n";
    return fmt::format("{} file{}, xxh3:{}", files.size(), files.size() == 1 ? "" : "s", checksum(all));
  }
  const std::vector<std::string> checkpoints =
      list_checkpoints(io::is_directory(path + "/ckpt") ? path + "/ckpt" : path);
  return checkpoints.empty() ? "no weights" : weights_fingerprint(checkpoints.front());
}

void state_program(StartFacts& facts) {
  facts.set("the program", fmt::format("sluice {}, build {}", build_info().version, program_build_id()));
  for (const LoadedCode& code : loaded_code())
    if (computes(code.name)) facts.set("the library " + code.name, "build " + code.build_id);
}

void state_configuration(StartFacts& facts, const Config& config) {
  Config copy = config;
  std::set<std::string> left_out = {"name", "train.threads", "train.device"};
  for_each_path(copy, [&](const std::string&, const std::string& key) { left_out.insert(key); });
  copy.run_dir = std::filesystem::absolute(copy.run_dir).lexically_normal().string();
  for_each_leaf(copy, [&](const std::string& key, auto& value, const char*) {
    if (left_out.count(key) == 0) facts.set(key, scalar_text(value));
  });
  facts.wait_seconds = config.parallel.timeout_seconds;
}

void state_device(StartFacts& facts, const Config& config) {
  const Device device = resolve_device(config.train.device);
  facts.set("train.device", device_name(device));
  if (device == Device::cuda) {
    facts.set("the GPU", cuda_devices()[static_cast<size_t>(chosen_cuda_device())].name);
    return;
  }
  facts.set("the instruction set (SLUICE_ISA)", isa_name(cpu_isa()));
  if (config.train.precision == Precision::bf16)
    facts.set("what multiplies bf16 (SLUICE_ISA)", bf16_unit_name(bf16_unit()));
  facts.set("the kernels of libraries", cpu::library_kernels());
  // With another number of threads results agree only up to rounding, but `exact` guarantees equal bits.
  if (config.parallel.determinism == Determinism::exact)
    facts.set("the number of threads (train.threads)", std::to_string(num_threads()));
}

void state_contents(StartFacts& facts, const std::string& name, const Blend& data) {
  facts.set(name, fmt::format("{} tokens, {}", data.num_tokens(), data.fingerprint()), ExitCode::data);
}

void state_data(StartFacts& facts, const Config& config, const Blend& training, const Evaluator& evaluator) {
  state_contents(facts, "the contents of data.train", training);
  for (size_t i = 0; i < evaluator.blends().size(); ++i)
    state_contents(facts, fmt::format("the contents of data.validation[{}]", i), *evaluator.blends()[i]);
  for (size_t i = 0; i < config.eval.tasks.size(); ++i)
    facts.set(fmt::format("the contents of eval.tasks[{}]", i),
              "xxh3:" + checksum(io::read_file(config.eval.tasks[i])), ExitCode::data);
  // A run that goes on does not need them any more; one that begins says itself what is missing.
  if (const std::string& weights = config.train.init_from; !weights.empty())
    facts.set("the contents of train.init_from",
              io::exists(weights) ? weights_fingerprint(weights) : "none, there is no such path",
              ExitCode::data);
}

void agree_on_threads(Communicator& ranks, const Config& config) {
  if (config.parallel.determinism != Determinism::exact) return;
  agree_on_start(ranks, [&](StartFacts& facts) {
    facts.wait_seconds = config.parallel.timeout_seconds;
    facts.set("the number of threads (train.threads)", std::to_string(num_threads()));
  });
}

void agree_on_checkpoint(Communicator& ranks, const std::string& folder, double wait_seconds) {
  const std::vector<std::string> here = list_checkpoints(folder);
  std::string newest = here.empty() ? "" : here.front().substr(folder.size() + 1), first = newest;
  broadcast_text(ranks, first,
                 0);  // on other ranks a network file system may list it late, but finds it by name
  if (!first.empty()) newest = first;
  agree_on_start(ranks, [&](StartFacts& facts) {
    std::string text = "none";
    if (!newest.empty()) {
      text = newest + ", ";
      try {
        text += "manifest xxh3:" + checksum(io::read_file(folder + "/" + newest + "/" + kManifestName));
      } catch (const Error&) {  // or a folder of that name: verification passes it over, and says so
        text += "whose manifest cannot be read";
      }
    }
    facts.wait_seconds = wait_seconds;
    facts.set("the newest checkpoint in " + folder, text, ExitCode::data);
  });
}

}  // namespace sluice
