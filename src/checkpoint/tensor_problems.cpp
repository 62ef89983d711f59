#include "checkpoint/tensor_problems.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "core/strict_json.h"

namespace sluice {
namespace {

constexpr size_t kMaxLines = 60;

/// The model keys that give the dimensions of a tensor, by the end of its name. The first match decides.
constexpr struct {
  std::string_view ending;
  std::array<std::string_view, 2> keys;
} kDimensions[] = {
    {"embed_tokens.weight", {"vocab_size", "hidden_size"}},
    {"lm_head.weight", {"vocab_size", "hidden_size"}},
    {"self_attn.q_proj.weight", {"num_attention_heads x head_dim", "hidden_size"}},
    {"self_attn.k_proj.weight", {"num_key_value_heads x head_dim", "hidden_size"}},
    {"self_attn.v_proj.weight", {"num_key_value_heads x head_dim", "hidden_size"}},
    {"self_attn.o_proj.weight", {"hidden_size", "num_attention_heads x head_dim"}},
    {"self_attn.gate_proj.weight", {"rows of the gate at sdpa_output", "hidden_size"}},
    {"self_attn.q_norm.weight", {"head_dim", ""}},
    {"self_attn.k_norm.weight", {"head_dim", ""}},
    {"self_attn.sinks", {"num_attention_heads", ""}},
    {"self_attn.sink_key", {"num_attention_heads", "head_dim"}},
    {"self_attn.bias_key", {"num_key_value_heads", "head_dim"}},
    {"self_attn.bias_value", {"num_key_value_heads", "head_dim"}},
    {"mlp.shared_expert.gate_proj.weight", {"shared_expert_intermediate_size", "hidden_size"}},
    {"mlp.shared_expert.up_proj.weight", {"shared_expert_intermediate_size", "hidden_size"}},
    {"mlp.shared_expert.down_proj.weight", {"hidden_size", "shared_expert_intermediate_size"}},
    {"mlp.experts.*.gate_proj.weight", {"moe_intermediate_size", "hidden_size"}},
    {"mlp.experts.*.up_proj.weight", {"moe_intermediate_size", "hidden_size"}},
    {"mlp.experts.*.down_proj.weight", {"hidden_size", "moe_intermediate_size"}},
    {"mlp.gate.weight", {"num_experts", "hidden_size"}},
    {"mlp.gate_proj.weight", {"intermediate_size", "hidden_size"}},
    {"mlp.up_proj.weight", {"intermediate_size", "hidden_size"}},
    {"mlp.down_proj.weight", {"hidden_size", "intermediate_size"}},
    {"layernorm.weight", {"hidden_size", ""}},
    {"model.norm.weight", {"hidden_size", ""}},
};

/// The likely reason why a tensor is missing or unexpected, by a part of its name.
constexpr struct {
  std::string_view part, missing, unexpected;
} kReasons[] = {
    {".lora_", "the configuration trains adapters",
     "adapters: sluice checkpoint merge joins them with the weights"},
    {"switch.weight", "model.attention.switch_heads has a router",
     "switch heads: model.attention.switch_heads"},
    {"layernorm.gate_", "model.gated_norm.rank", "model.gated_norm.rank"},
    {"exclusive_scale", "model.attention.exclusive: learned", "model.attention.exclusive"},
    {"gate_proj.bias", "a gate of the configuration has a bias: model.attention.gates",
     "the bias of a gate: model.attention.gates"},
    {"self_attn.gate", "the configuration has a gate: model.attention.gates",
     "a gate that the configuration lacks: model.attention.gates"},
    {"_gate", "the configuration has a gate: model.attention.gates, model.moe.shared_expert_gate",
     "a gate that the configuration lacks: model.attention.gates, model.moe.shared_expert_gate"},
    {"q_norm", "model.qk_norm", "model.qk_norm"},
    {"k_norm", "model.qk_norm", "model.qk_norm"},
    {"o_norm", "model.attention.output_norm", "model.attention.output_norm"},
    {"branch_layernorm", "model.norm_placement", "model.norm_placement"},
    {"feedforward_layernorm", "", "norms around the branches, from another model type"},
    {"embed_norm", "model.embedding_norm", "model.embedding_norm"},
    {"sinks", "model.attention.kind", "model.attention.kind"},
    {"sink_key", "model.attention.kind", "model.attention.kind"},
    {"bias_key", "model.attention.kind", "model.attention.kind"},
    {"bias_value", "model.attention.kind", "model.attention.kind"},
    {"lm_head", "model.tie_word_embeddings", "model.tie_word_embeddings"},
    {"shared_expert", "model.moe.shared_expert_intermediate_size",
     "model.moe.shared_expert_intermediate_size"},
    {"experts", "model.moe", "model.moe"},
    {"mlp.gate.weight", "model.moe.num_experts", "model.moe.num_experts"},
    {".bias", "", "biases, which Sluice's models do not have"},
    {"qweight", "", "quantised weights, which are not read"},
    {"qzeros", "", "quantised weights, which are not read"},
    {"scale", "", "quantised weights, which are not read"},
};

/// A name with its numbers replaced, "model.layers.*.mlp.experts.*.up_proj.weight", and the first two
/// numbers.
struct Pattern {
  std::string text;
  std::vector<std::string> numbers;
};

Pattern pattern_of(const std::string& name) {
  Pattern out;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string word = name.substr(begin, end - begin);
    const bool number = !word.empty() && word.find_first_not_of("0123456789") == std::string::npos;
    out.text += (begin == 0 ? "" : ".") + (number ? std::string("*") : word);
    if (number) out.numbers.push_back(word);
    begin = end + 1;
  }
  return out;
}

struct Group {
  std::string first_name, shape;
  size_t count = 0;
  std::set<std::string> layers, experts;
};

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("({})", fmt::join(shape, ", "));
}

/// "missing: self_attn.gate_proj.weight in 12 layers, (32, 16)", with the likely reason.
template <class List>
void add_groups(const char* what, const List& tensors, std::vector<std::string>& lines) {
  std::vector<std::string> order;
  std::map<std::string, Group> groups;
  for (const auto& t : tensors) {
    const Pattern pattern = pattern_of(t.name);
    const auto [found, fresh] = groups.try_emplace(pattern.text);
    Group& group = found->second;
    if (fresh) {
      order.push_back(pattern.text);
      group.first_name = t.name;
      group.shape = shape_text(t.shape) + (t.dtype.empty() ? "" : " " + printable(t.dtype));
    }
    ++group.count;
    if (!pattern.numbers.empty()) group.layers.insert(pattern.numbers[0]);
    if (pattern.numbers.size() > 1) group.experts.insert(pattern.numbers[1]);
  }
  for (const std::string& text : order) {
    const Group& group = groups[text];
    std::string name = group.first_name;
    if (group.count > 1) {
      constexpr std::string_view layers = "model.layers.*.";
      name = text.starts_with(layers) ? text.substr(layers.size()) : text;
    }
    std::string line = fmt::format("{}: {}", what, printable(name));
    if (group.count > 1 && !group.experts.empty())
      line += fmt::format(" of {} experts", group.experts.size());
    if (group.count > 1)
      line += fmt::format(" in {} layer{}", group.layers.size(), group.layers.size() == 1 ? "" : "s");
    line += (group.count > 1 ? ", " : " ") + group.shape;
    for (const auto& r : kReasons) {
      if (text.find(r.part) == std::string::npos) continue;
      const std::string_view reason = what[0] == 'm' ? r.missing : r.unexpected;
      if (!reason.empty()) line += fmt::format(" ({})", reason);
      break;
    }
    lines.push_back(line);
  }
}

/// The number after `before` in a name, or -1.
int64_t number_after(std::string_view name, std::string_view before) {
  const size_t at = name.find(before);
  if (at == std::string_view::npos) return -1;
  int64_t number = -1;
  for (size_t i = at + before.size(); i < name.size() && name[i] >= '0' && name[i] <= '9' && number < 1 << 24;
       ++i)
    number = std::max<int64_t>(number, 0) * 10 + (name[i] - '0');
  return number;
}

/// If all layers beyond some number are missing or unexpected, the number of layers differs; likewise for
/// experts. Removes these tensors from the lists.
template <class List>
void take_out_beyond(std::string_view before, const char* key, const std::string& source, List& missing,
                     List& unexpected, std::vector<std::string>& lines) {
  // Only complete tails count: one of the two lists must have none of these layers.
  const auto range = [&](const List& list) {
    int64_t least = -1, most = -1;
    for (const auto& t : list)
      if (const int64_t n = number_after(t.name, before); n >= 0) {
        least = least < 0 ? n : std::min(least, n);
        most = std::max(most, n);
      }
    return std::pair(least, most);
  };
  const auto [first_missing, last_missing] = range(missing);
  const auto [first_extra, last_extra] = range(unexpected);
  const bool fewer = first_missing > 0 && first_extra<0, more = first_extra> 0 && first_missing < 0;
  if (!fewer && !more) return;
  List& list = fewer ? missing : unexpected;
  const int64_t first = fewer ? first_missing : first_extra, last = fewer ? last_missing : last_extra;
  // The tail of a model repeats the kinds of tensors of its first layer.
  std::set<std::string> kinds_of_first, kinds_of_last;
  for (const auto& t : list) {
    const int64_t n = number_after(t.name, before);
    if (n == first) kinds_of_first.insert(pattern_of(t.name).text);
    if (n == last) kinds_of_last.insert(pattern_of(t.name).text);
  }
  constexpr size_t kLeastKinds = 3;  // a single kind in the later layers is a choice of layers
  if (kinds_of_first.size() < kLeastKinds || kinds_of_last.size() < kLeastKinds) return;
  lines.push_back(fmt::format("{}: {} {}, configuration {}", key, source, fewer ? first : last + 1,
                              fewer ? last + 1 : first));
  std::erase_if(list, [&](const auto& t) { return number_after(t.name, before) >= first; });
}

}  // namespace

void TensorProblems::shape(const StoredTensor& stored, const TensorShape& wanted) {
  shapes_.push_back({{stored.name, stored.shape, stored.dtype}, wanted.shape});
}

std::vector<std::string> TensorProblems::lines(const std::string& source) const {
  std::vector<std::string> lines;
  std::vector<std::string> rest;
  std::map<std::string, size_t> sizes;  // line of a size -> tensors
  std::vector<std::string> order;
  for (const Shape& s : shapes_) {
    const std::string name = pattern_of(s.stored.name).text;
    const auto known = std::find_if(std::begin(kDimensions), std::end(kDimensions),
                                    [&](const auto& d) { return name.ends_with(d.ending); });
    const size_t rank = known == std::end(kDimensions) || known->keys[1].empty() ? 1 : 2;
    if (known == std::end(kDimensions) || s.stored.shape.size() != rank || s.wanted.size() != rank) {
      rest.push_back(fmt::format("shape: {} is {} {}, the model wants {}", printable(s.stored.name),
                                 shape_text(s.stored.shape), printable(s.stored.dtype),
                                 shape_text(s.wanted)));
      continue;
    }
    for (size_t i = 0; i < rank; ++i) {
      if (s.stored.shape[i] == s.wanted[i]) continue;
      const std::string line =
          fmt::format("{}: {} {}, configuration {}", known->keys[i], source, s.stored.shape[i], s.wanted[i]);
      if (sizes[line]++ == 0) order.push_back(line);
    }
  }
  for (const std::string& line : order)
    lines.push_back(fmt::format("{} (in {} tensor{})", line, sizes[line], sizes[line] == 1 ? "" : "s"));
  std::vector<One> missing = missing_, unexpected = unexpected_;
  take_out_beyond("model.layers.", "num_hidden_layers", source, missing, unexpected, lines);
  take_out_beyond(".mlp.experts.", "num_experts", source, missing, unexpected, lines);
  add_groups("missing", missing, lines);
  add_groups("unexpected", unexpected, lines);
  lines.insert(lines.end(), rest.begin(), rest.end());
  lines.insert(lines.end(), others_.begin(), others_.end());
  if (lines.size() > kMaxLines) {
    const size_t left = lines.size() - kMaxLines;
    lines.resize(kMaxLines);
    lines.push_back(fmt::format("and {} more lines", left));
  }
  return lines;
}

}  // namespace sluice
