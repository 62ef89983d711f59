#include "params/adapters.h"

#include <cmath>
#include <string_view>

#include "config/problems.h"

namespace sluice {

bool AdapterTargets::take(const ParamSpec& spec) {
  constexpr std::string_view kWeight = ".weight";
  if (!active() || !spec.name.ends_with(kWeight)) return false;
  const std::string_view module(spec.name.data(), spec.name.size() - kWeight.size());
  bool found = false;
  for (size_t i = 0; i < lora_.targets.size(); ++i) {
    const std::string& target = lora_.targets[i];
    if (module != target && !module.ends_with("." + target)) continue;
    used_[i] = found = true;
  }
  if (found && spec.when_frozen != WhenFrozen::adapted)
    refuse(
        {"lora.targets"},
        fmt::format("lora.targets: {} is named, but gets no adapter in this version (nor do experts, their "
                    "routers, norms, embedding and head); name matrices by more of their names, as "
                    "self_attn.gate_proj",
                    spec.name));
  return found;
}

void AdapterTargets::check_used() const {
  ProblemList problems;
  for (size_t i = 0; active() && i < used_.size(); ++i)
    if (!used_[i])
      problems({"lora.targets"},
               fmt::format("lora.targets: no matrix of this model is called {}", lora_.targets[i]));
  problems.raise();
}

std::array<ParamSpec, 2> AdapterTargets::specs_for(const ParamSpec& matrix) const {
  const std::string module = matrix.name.substr(0, matrix.name.rfind('.'));
  const int64_t out_features = matrix.shape[0], in_features = matrix.shape[1];
  return {ParamSpec{.name = module + ".lora_A.weight",
                    .shape = {lora_.rank, in_features},
                    .init = Init::normal(1 / std::sqrt(3.0 * static_cast<double>(in_features))),
                    .packed = true,
                    .adapter = true},
          ParamSpec{.name = module + ".lora_B.weight",
                    .shape = {out_features, lora_.rank},
                    .init = Init::constant(0),
                    .packed = true,
                    .adapter = true}};
}

}  // namespace sluice
