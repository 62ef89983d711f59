#include "run/program_facts.h"

#include <cblas.h>
#include <dnnl.h>
#include <spdlog/fmt/fmt.h>

#include <vector>

#include "comm/device.h"
#include "comm/mpi.h"
#include "core/build_info.h"
#include "core/cpu_features.h"
#include "core/device.h"

namespace sluice {
namespace {

struct Fact {
  const char *key, *label;
  std::string value;
};

/// "OpenBLAS 0.3.21" of the text in which it names every option it was built with.
std::string openblas_version() {
  const std::string all = openblas_get_config();
  return all.substr(0, all.find(' ', all.find(' ') + 1));
}

std::vector<Fact> facts() {
  const BuildInfo& b = build_info();
  const dnnl_version_t* dnnl = dnnl_version();
  const std::string nccl = built_with_cuda() ? nccl_version() : "";
  return {
      {"commit", "commit", b.commit},
      {"compiler", "compiler", b.compiler},
      {"build_type", "build type", b.build_type},
      {"instruction_sets", "instruction sets",
       fmt::format("{}; here {}", b.instruction_sets, isa_name(cpu_isa()))},
      {"cuda", "CUDA", nccl.empty() ? b.cuda : fmt::format("{}, {}", b.cuda, nccl)},
      {"mpi", "MPI", built_with_mpi() ? mpi_version() : "off"},
      {"matrix_products", "matrix products",
       fmt::format("oneDNN {}.{}.{}, {}", dnnl->major, dnnl->minor, dnnl->patch, openblas_version())},
  };
}

}  // namespace

std::string program_text() {
  std::string text = fmt::format("sluice {}\n", build_info().version);
  for (const Fact& f : facts())
    text += fmt::format("  {:<18}{}\n", f.label,
                        f.value == "unknown" ? "unknown " + std::string(f.label) : f.value);
  return text;
}

nlohmann::ordered_json program_json() {
  nlohmann::ordered_json json;
  for (const Fact& f : facts()) json[f.key] = f.value;
  return json;
}

}  // namespace sluice
