// Reads config.json files of other programs: translates them to Sluice's keys and lists values without
// counterpart.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <type_traits>

#include "config/fields.h"
#include "config/model_function.h"
#include "core/io.h"
#include "core/strict_json.h"
#include "hf/config.h"
#include "hf/json_section.h"
#include "hf/model_types.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr int64_t kMaxFileBytes = int64_t{16} << 20;
/// The rotary keys of one of the two spellings.
struct Rope {
  std::string type = "default";
  std::optional<double> theta;
  RopeScalingConfig scaling;
  bool operator==(const Rope& o) const {
    return type == o.type && (theta == o.theta || !theta || !o.theta) && scaling.factor == o.scaling.factor &&
           scaling.original_max_position_embeddings == o.scaling.original_max_position_embeddings &&
           scaling.beta_fast == o.scaling.beta_fast && scaling.beta_slow == o.scaling.beta_slow &&
           scaling.attention_factor == o.scaling.attention_factor && scaling.truncate == o.scaling.truncate;
  }
};

class Reading {
 public:
  Reading(const json& object, const std::string& path) : top_(object, path), path_(path) {}

  HfModel read() {
    const ModelType& type = find_type();
    own_ = out_.model_type == kOwnType;
    next_ = out_.model_type == "qwen3_next";
    gpt_ = out_.model_type == "gpt_oss";
    read_shape(type);
    read_rope();
    out_.begin_stated = own_ || top_.object().contains("sluice_begin_token");
    out_.begin_token = token_id(own_ || !out_.begin_stated ? "bos_token_id" : "sluice_begin_token");
    out_.end_token = token_id("eos_token_id");
    if (own_) read_own();
    if (gpt_)
      read_gpt_oss();
    else if (type.experts)
      read_experts();
    if (next_) read_qwen3_next();
    out_.format = own_           ? HfFormat::sluice
                  : next_        ? HfFormat::qwen3_next
                  : gpt_         ? HfFormat::gpt_oss
                  : type.experts ? HfFormat::qwen3_moe
                  : type.qk_norm ? HfFormat::qwen3
                                 : HfFormat::llama;
    if (out_.format == HfFormat::qwen3) read_gated_qwen3();
    refuse_unknown(type);
    if (type.vocab_size == 0 && !top_.find("vocab_size"))
      fail(ExitCode::data,
           "{}: vocab_size is missing: a model of type {} has no usual one; set it to the rows of its "
           "embedding",
           path_, type.name);
    return std::move(out_);
  }

 private:
  /// The number of a token, or the first of a list of them.
  std::optional<int64_t> token_id(const std::string& key) const {
    const json* value = top_.find(key);
    if (value && value->is_array()) value = value->empty() ? nullptr : &value->front();
    if (!value) return std::nullopt;
    if (!value->is_number_integer() || (value->is_number_unsigned() && value->get<uint64_t>() > INT32_MAX) ||
        value->get<int64_t>() < 0 || value->get<int64_t>() > INT32_MAX)
      top_.refuse(key, "the number of a token, or a list of them");
    return value->get<int64_t>();
  }

  const ModelType& find_type() {
    out_.model_type = top_.text("model_type", "");
    std::string known;
    for (const ModelType& type : kTypes) {
      if (out_.model_type == type.name) return type;
      known += (known.empty() ? "" : ", ") + std::string(type.name);
    }
    if (out_.model_type.empty()) fail(ExitCode::data, "{}: no model_type; supported are {}", path_, known);
    std::string reason;
    for (const auto& other : kUnreadable)
      if (out_.model_type.starts_with(other.prefix)) reason = fmt::format(" ({})", other.reason);
    fail(ExitCode::data, "{}: weights of model_type {} are not supported by this version{}; supported are {}",
         path_, printable(out_.model_type), reason, known);
  }

  void spelled(const std::string& model_key, const JsonSection& section, const std::string& key) {
    out_.spelled[model_key] = {section.name(key), section.find(key) != nullptr};
  }
  /// A size that has the same name in Sluice; records its place in the file.
  void size(const char* key, int64_t& target, int64_t otherwise) {
    target = top_.integer(key, otherwise);
    spelled("model." + std::string(key), top_, key);
  }
  void unsupported(const std::string& key, const json& value, const std::string& accepted_by,
                   const std::string& remark = "") {
    const std::string text = fmt::format("{} = {}", printable(key), shown_json(value));
    out_.unsupported.push_back({remark.empty() ? text : fmt::format("{} ({})", text, remark), accepted_by});
  }

  void read_shape(const ModelType& type) {
    ModelConfig& m = out_.model;
    size("vocab_size", m.vocab_size, type.vocab_size);
    size("hidden_size", m.hidden_size, type.hidden_size);
    size("intermediate_size", m.intermediate_size, type.intermediate_size);
    size("num_hidden_layers", m.num_hidden_layers, type.num_hidden_layers);
    size("num_attention_heads", m.num_attention_heads, type.num_attention_heads);
    // Null is not the same as absent.
    const bool heads_alike = type.num_key_value_heads == 0 || top_.object().contains("num_key_value_heads");
    size("num_key_value_heads", m.num_key_value_heads,
         heads_alike ? m.num_attention_heads : type.num_key_value_heads);
    size("head_dim", m.head_dim, type.head_dim ? type.head_dim : m.hidden_size / m.num_attention_heads);
    m.tie_word_embeddings = top_.boolean("tie_word_embeddings", false);
    spelled("model.tie_word_embeddings", top_, "tie_word_embeddings");
    m.rms_norm_eps = top_.number("rms_norm_eps", gpt_ ? 1e-5 : 1e-6);
    spelled("model.rms_norm_eps", top_, "rms_norm_eps");
    if (const std::string act = top_.text("hidden_act", "silu"); act == "relu2" && own_)
      m.hidden_act = HiddenAct::relu2;
    else if (act != "silu" && act != "swish")
      unsupported("hidden_act", act, "model.hidden_act");
    spelled("model.hidden_act", top_, "hidden_act");
    if (const int64_t positions = top_.integer("max_position_embeddings", 0))
      m.max_position_embeddings = positions;
    m.qk_norm = type.qk_norm;
    if (!type.attention_bias) return;
    m.attention_bias = top_.boolean("attention_bias", gpt_);
    spelled("model.attention_bias", top_, "attention_bias");
  }

  // ---- positions

  void read_rope() {
    const std::optional<JsonSection> old = top_.section("rope_scaling"),
                                     now = top_.section("rope_parameters");
    Rope rope;
    if (old) rope = rope_of(*old);
    if (now) {
      const Rope other = rope_of(*now);
      if (old && !(other == rope))
        fail(ExitCode::data, "{}: rope_scaling and rope_parameters are both present and differ", path_);
      rope = other;
    }
    RopeConfig& out = out_.model.rope;
    if (gpt_) out.theta = kGptOssTheta;
    if (gpt_ && !old && !now) rope.scaling = kGptOssScaling;
    const JsonSection& inner = now ? *now : old ? *old : top_;
    const JsonSection& from = inner.find("rope_theta") ? inner : top_;
    out.theta = from.positive("rope_theta", out.theta);
    if (rope.theta && top_.find("rope_theta") && top_.number("rope_theta", 0) != *rope.theta)
      fail(ExitCode::data, "{}: rope_theta is {} and {} is {}", path_, top_.number("rope_theta", 0),
           from.name("rope_theta"), *rope.theta);
    spelled("model.rope.theta", from, "rope_theta");
    out.scaling = rope.scaling;
    for (const char* key : {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
                            "attention_factor", "truncate"})
      spelled("model.rope.scaling." + std::string(key), inner, key);
    spelled("model.rope.scaling.type", inner, inner.find("type") ? "type" : "rope_type");
  }

  Rope rope_of(const JsonSection& s) {
    Rope rope;
    if (s.find("rope_theta")) rope.theta = s.positive("rope_theta", 0);
    const std::string type = s.text("type", "default");
    rope.type = s.text("rope_type", type);
    if (s.find("type") && type != rope.type)
      s.refuse("type", fmt::format("{}, as rope_type is", printable(rope.type)));
    const bool yarn = rope.type == "yarn";
    if (!yarn && rope.type != "default") {
      unsupported(s.name("rope_type"), rope.type, "model.rope.scaling", "supported are default and yarn");
      return rope;
    }
    constexpr std::string_view known[] = {"type", "rope_type", "rope_theta", "finetuned"};
    constexpr std::string_view of_yarn[] = {"factor",           "original_max_position_embeddings",
                                            "beta_fast",        "beta_slow",
                                            "attention_factor", "mscale",
                                            "mscale_all_dim",   "truncate"};
    for (const auto& [key, value] : s.object().items()) {
      if (value.is_null() || std::find(std::begin(known), std::end(known), key) != std::end(known)) continue;
      if (yarn && std::find(std::begin(of_yarn), std::end(of_yarn), key) != std::end(of_yarn)) continue;
      if (key == "partial_rotary_factor" && value == 1) continue;
      unsupported(s.name(key), value, key == "partial_rotary_factor" ? "model.rope" : "model.rope.scaling");
    }
    if (yarn) rope.scaling = yarn_of(s);
    return rope;
  }

  RopeScalingConfig yarn_of(const JsonSection& s) {
    RopeScalingConfig out;
    out.type = RopeScalingType::yarn;
    const std::string original = "original_max_position_embeddings";
    const int64_t positions = out_.model.max_position_embeddings.value_or(0);
    if (!s.find(original) && positions == 0) s.refuse(original, "given where max_position_embeddings is not");
    out.original_max_position_embeddings = s.integer(original, positions);
    if (!s.find("factor") && positions == 0) s.refuse("factor", "given where max_position_embeddings is not");
    out.factor = s.number(
        "factor", static_cast<double>(positions) / static_cast<double>(out.original_max_position_embeddings));
    if (out.factor < 1) s.refuse("factor", "at least 1");
    out.beta_fast = s.positive("beta_fast", out.beta_fast);
    out.beta_slow = s.positive("beta_slow", out.beta_slow);
    const auto stretch = [&](double scale) { return 0.1 * scale * std::log(out.factor) + 1; };
    const double mscale = s.number("mscale", 0), all = s.number("mscale_all_dim", 0);
    const double usual = mscale != 0 && all != 0 ? stretch(mscale) / stretch(all) : stretch(1);
    const double stretched = s.number("attention_factor", usual);
    if (!(stretched > 0)) s.refuse("attention_factor", "above 0");
    if (std::abs(stretched - stretch(1)) > 1e-6 * stretch(1)) out.attention_factor = stretched;
    out.truncate = s.boolean("truncate", true);
    return out;
  }

  // ---- experts

  void read_experts() {
    MoeConfig& e = out_.model.moe;
    const bool qwen = !own_;
    // transformers 5 writes num_local_experts.
    const char* name = top_.find("num_experts") ? "num_experts" : "num_local_experts";
    e.num_experts = top_.integer(name, next_ ? 512 : qwen ? 128 : 0, 0);
    if (top_.integer("num_local_experts", e.num_experts, 0) != e.num_experts)
      top_.refuse("num_local_experts", fmt::format("{}, as num_experts is", e.num_experts));
    spelled("model.moe.num_experts", top_, name);
    const auto key = [&](const char* k, int64_t& target, int64_t otherwise, int64_t low = 1) {
      target = top_.integer(k, otherwise, low);
      spelled("model.moe." + std::string(k), top_, k);
    };
    key("num_experts_per_tok", e.num_experts_per_tok, next_ ? 10 : 8);
    key("moe_intermediate_size", e.moe_intermediate_size, next_ ? 512 : 768);
    key("decoder_sparse_step", e.decoder_sparse_step, 1);
    e.norm_topk_prob = top_.boolean("norm_topk_prob", own_ || next_);
    spelled("model.moe.norm_topk_prob", top_, "norm_topk_prob");
    e.mlp_only_layers = top_.integers("mlp_only_layers");
    spelled("model.moe.mlp_only_layers", top_, "mlp_only_layers");
    if (qwen && !next_) return;
    key("shared_expert_intermediate_size", e.shared_expert_intermediate_size, next_ ? 512 : 0, 0);
    if (next_) return;
    e.shared_expert_gate = top_.boolean("shared_expert_gate", false);
    spelled("model.moe.shared_expert_gate", top_, "shared_expert_gate");
    e.bias = top_.boolean("moe_bias", false);
    spelled("model.moe.bias", top_, "moe_bias");
    if (top_.find("swiglu_limit")) e.swiglu_limit = top_.positive("swiglu_limit", 0);
    spelled("model.moe.swiglu_limit", top_, "swiglu_limit");
  }

  /// Every layer has experts, of the width intermediate_size. A softmax over the chosen logits is that over
  /// all of them, divided by the sum of the chosen.
  void read_gpt_oss() {
    out_.model.attention.kind = AttentionKind::sink;
    MoeConfig& e = out_.model.moe;
    e.num_experts = top_.integer("num_local_experts", 128, 0);
    if (e.num_experts == 0) unsupported("num_local_experts", 0, "model.moe", "every layer has experts");
    spelled("model.moe.num_experts", top_, "num_local_experts");
    e.num_experts_per_tok = top_.integer("num_experts_per_tok", 4);
    spelled("model.moe.num_experts_per_tok", top_, "num_experts_per_tok");
    e.moe_intermediate_size = out_.model.intermediate_size;
    spelled("model.moe.moe_intermediate_size", top_, "intermediate_size");
    e.norm_topk_prob = e.bias = true;
    e.swiglu_limit = top_.positive("swiglu_limit", 7);
    spelled("model.moe.swiglu_limit", top_, "swiglu_limit");
    if (const double slope = top_.number("swiglu_alpha", kGptOssSlope); slope != kGptOssSlope)
      unsupported("swiglu_alpha", slope, "model.moe.swiglu_limit", "in Sluice 1.702");
  }

  // ---- gates of other programs

  /// Attention layers whose output has an elementwise sigmoid gate, and a shared expert with a gate.
  void read_qwen3_next() {
    out_.model.attention.gates = {GateConfig{}};
    MoeConfig& e = out_.model.moe;
    e.shared_expert_gate = e.num_experts > 0;
    if (e.num_experts > 0 && e.shared_expert_intermediate_size == 0)
      unsupported("shared_expert_intermediate_size", 0, "model.moe", "every layer has a shared expert");
    if (top_.list("layer_types").empty() && top_.integer("full_attention_interval", 4) != 1)
      unsupported("layer_types", nullptr, "model.attention",
                  "most layers have linear attention unless it lists full_attention for each");
    const auto rope = top_.section("rope_parameters");
    if (!top_.find("partial_rotary_factor") && !(rope && rope->find("partial_rotary_factor")))
      unsupported("partial_rotary_factor", nullptr, "model.rope", "its default is 0.25");
  }

  /// Keys of qiuzh20/gated_attention, whose model_type is Qwen3's.
  void read_gated_qwen3() {
    const bool elementwise = top_.boolean("elementwise_attn_output_gate", false);
    const bool headwise = top_.boolean("headwise_attn_output_gate", false);
    out_.model.qk_norm = top_.boolean("use_qk_norm", true);
    spelled("model.qk_norm", top_, "use_qk_norm");
    if (!elementwise && !headwise) return;
    if (elementwise && headwise)
      top_.refuse("headwise_attn_output_gate", "false where the elementwise one is");
    GateConfig gate;
    if (headwise) gate.granularity = GateGranularity::headwise;
    if (out_.model.attention_bias) unsupported("attention_bias", true, "", "beside a gate in q_proj");
    out_.model.attention.gates = {gate};
    out_.format = HfFormat::gated_attention;
  }

  // ---- keys of model_type sluice

  void read_own() {
    ModelConfig& m = out_.model;
    const ModelConfig defaults;
    m.qk_norm = top_.boolean("qk_norm", defaults.qk_norm);
    m.qk_norm_order = top_.word("qk_norm_order", defaults.qk_norm_order);
    m.norm_placement = top_.word("norm_placement", defaults.norm_placement);
    m.norm_weights = top_.boolean("norm_weights", defaults.norm_weights);
    m.embedding_norm = top_.boolean("embedding_norm", defaults.embedding_norm);
    m.branch_clip = top_.optional_number("branch_clip");
    m.final_logit_softcapping = top_.optional_number("final_logit_softcapping");
    for (const char* key : {"qk_norm", "qk_norm_order", "norm_placement", "norm_weights", "embedding_norm",
                            "branch_clip", "final_logit_softcapping"})
      spelled("model." + std::string(key), top_, key);
    if (const auto lora = top_.section("lora")) out_.lora_rank = lora->integer("rank", 0, 0);
    if (const auto norm = top_.section("gated_norm")) {
      norm->no_other_keys({"rank"});
      m.gated_norm.rank = norm->integer("rank", 0, 0);
      spelled("model.gated_norm.rank", *norm, "rank");
    }
    const auto attention = top_.section("attention");
    if (attention) read_attention(*attention);
  }

  void read_attention(const JsonSection& s) {
    s.no_other_keys({"kind", "window", "window_pattern", "gates", "exclusive", "output_norm",
                     "output_activation", "switch_heads", "sparse"});
    AttentionConfig& a = out_.model.attention;
    a.kind = s.word("kind", a.kind);
    a.exclusive = s.word("exclusive", a.exclusive);
    a.output_norm = s.word("output_norm", a.output_norm);
    a.output_activation = s.word("output_activation", a.output_activation);
    a.window = s.integer("window", 0, 0);
    a.window_pattern = s.integer("window_pattern", 0, 0);
    for (const char* key :
         {"kind", "window", "window_pattern", "gates", "exclusive", "output_norm", "output_activation"})
      spelled("model.attention." + std::string(key), s, key);
    for (const json& gate : s.list("gates")) {
      if (!gate.is_object()) s.refuse("gates", "a list of objects");
      const std::string name = fmt::format("gates[{}]", a.gates.size());
      const JsonSection one(gate, path_, s.name(name) + ".");
      one.no_other_keys(
          {"position", "granularity", "heads", "combine", "activation", "input", "input_channels", "bias"});
      GateConfig g;
      g.position = one.word("position", g.position);
      g.granularity = one.word("granularity", g.granularity);
      g.heads = one.word("heads", g.heads);
      g.combine = one.word("combine", g.combine);
      g.activation = one.word("activation", g.activation);
      g.input = one.word("input", g.input);
      g.input_channels = one.integer("input_channels", 0, 0);
      g.bias = one.optional_number("bias");
      a.gates.push_back(g);
      for (const char* key :
           {"position", "granularity", "heads", "combine", "activation", "input", "input_channels", "bias"})
        spelled(fmt::format("model.attention.{}.{}", name, key), one, key);
    }
    if (const auto sparse = s.section("sparse")) read_sparse(*sparse);
    const auto heads = s.section("switch_heads");
    if (!heads) return;
    heads->no_other_keys({"num_experts", "num_experts_per_tok", "projections", "expert_width"});
    SwitchHeadsConfig& w = a.switch_heads;
    w.num_experts = heads->integer("num_experts", 0, 0);
    w.num_experts_per_tok = heads->integer("num_experts_per_tok", w.num_experts_per_tok);
    w.projections = heads->word("projections", w.projections);
    w.expert_width = heads->integer("expert_width", 0, 0);
    for (const char* key : {"num_experts", "num_experts_per_tok", "projections", "expert_width"})
      spelled("model.attention.switch_heads." + std::string(key), *heads, key);
  }

  static void read_leaf(const JsonSection& s, const std::string& key, int64_t& member) {
    member = s.integer(key, member, 0);
  }
  static void read_leaf(const JsonSection& s, const std::string& key, double& member) {
    member = s.number(key, member);
  }
  static void read_leaf(const JsonSection& s, const std::string& key, bool& member) {
    member = s.boolean(key, member);
  }
  static void read_leaf(const JsonSection& s, const std::string& key, std::optional<double>& member) {
    member = s.optional_number(key);
  }
  template <class E>
  requires std::is_enum_v<E>
  static void read_leaf(const JsonSection& s, const std::string& key, E& member) {
    member = s.word(key, member);
  }

  /// The keys that hf_config writes of model.attention.sparse, in the same sections.
  void read_sparse(const JsonSection& s) {
    std::map<std::string, std::set<std::string, std::less<>>>
        known;  // by section, "" for the keys outside of them
    for_each_leaf(out_.model.attention.sparse, [&](const std::string& key, auto& member, const char*) {
      const std::string whole = "model.attention.sparse." + key;
      if (!changes_function(whole)) return;
      const size_t dot = key.find('.');
      const std::string section = dot == std::string::npos ? "" : key.substr(0, dot);
      const std::string name = dot == std::string::npos ? key : key.substr(dot + 1);
      known[section].insert(name);
      if (!section.empty()) known[""].insert(section);
      const auto inner = section.empty() ? std::optional<JsonSection>(s) : s.section(section);
      if (!inner) return;
      read_leaf(*inner, name, member);
      spelled(whole, *inner, name);
    });
    for (const auto& [section, names] : known) {
      const auto inner = section.empty() ? std::optional<JsonSection>(s) : s.section(section);
      if (inner) inner->no_other_keys(names);
    }
  }

  // ---- values without counterpart

  /// How gpt-oss's experts are published, which hf/layouts.h reads.
  bool is_mxfp4(const std::string& key, const json& value) const {
    return gpt_ && key == "quantization_config" && value.is_object() &&
           value.value("quant_method", json()) == "mxfp4";
  }
  /// Whether a key has a counterpart in the model that was read.
  bool taken(const std::string& key) const {
    return std::any_of(out_.spelled.begin(), out_.spelled.end(),
                       [&](const auto& entry) { return entry.second.key == key; });
  }

  void refuse_unknown(const ModelType& type) {
    for (const auto& n : kNeutral)
      if (const json* value = top_.find(n.key);
          value && *value != n.neutral && !taken(n.key) && !is_mxfp4(n.key, *value))
        unsupported(n.key, *value, n.accepted_by);
    if (own_) return;  // attention.window says which layers have one
    read_windows(type);
    if (const json* value = top_.find("final_logit_softcapping"))
      unsupported("final_logit_softcapping", *value, "model.final_logit_softcapping");
    const json* value = top_.find("auto_map");
    if (value && out_.format != HfFormat::gated_attention)
      unsupported("auto_map", *value, "model", "the model needs its own code");
    const json& architectures = top_.list("architectures");
    if (!architectures.empty() &&
        std::find(architectures.begin(), architectures.end(), type.architecture) == architectures.end())
      unsupported("architectures", architectures, "model",
                  fmt::format("model_type {} stands for {}", type.name, type.architecture));
  }

  // ---- sliding windows

  /// Mistral and Qwen3-MoE have one window in all layers. Qwen3 and gpt-oss list the layers that have one;
  /// without a list every other layer of a gpt-oss has.
  void read_windows(const ModelType& type) {
    const std::string_view name = type.name;
    const bool qwen = name == "qwen3" || name == "qwen3_moe", mistral = name == "mistral";
    const bool absent = !top_.object().contains("sliding_window");
    const int64_t usual = mistral || qwen ? kWindow : gpt_ ? kGptOssWindow : 0;
    int64_t window = top_.integer("sliding_window", absent ? usual : 0, 0);
    if (!top_.boolean("use_sliding_window", !qwen)) window = 0;
    if (name == "qwen3" || gpt_) {
      read_layer_windows(window);
    } else {
      refuse_other_layers(window > 0 ? "sliding_attention" : "full_attention");
      if (window > 0 && !qwen && !mistral) unsupported("sliding_window", window, "model.attention.window");
      if (qwen || mistral) set_window(window, 0);
    }
  }

  void set_window(int64_t window, int64_t pattern) {
    out_.model.attention.window = window;
    out_.model.attention.window_pattern = pattern;
    spelled("model.attention.window", top_, "sliding_window");
    spelled("model.attention.window_pattern", top_, "layer_types");
  }

  void refuse_layers(const json& layers, const char* why) {
    unsupported("layer_types", layers, "model.attention", why);
  }
  /// layer_types, where they are listed, are all of a kind, or of full attention.
  void refuse_other_layers(const std::string& kind) {
    const json& layers = top_.list("layer_types");
    const auto all_are = [&](const char* one) {
      return std::all_of(layers.begin(), layers.end(), [&](const json& layer) { return layer == one; });
    };
    if (!all_are(kind.c_str()) && !all_are("full_attention"))
      refuse_layers(layers, "layers of this kind are not imported");
  }

  /// The layers with a window: those of layer_types, or from max_window_layers on. Sluice has it in all
  /// layers or in all but every n-th.
  void read_layer_windows(int64_t window) {
    const json& layers = top_.list("layer_types");
    const int64_t count = out_.model.num_hidden_layers;
    if (layers.empty() && gpt_) return set_window(window, window > 0 && count > 1 ? 2 : 0);
    if (layers.empty()) {
      const int64_t first = window > 0 ? top_.integer("max_window_layers", 28, 0) : count;
      if (first == 0) set_window(window, 0);
      if (first > 0 && first < count)
        unsupported("max_window_layers", first, "model.attention.window",
                    "windows from this layer on; in Sluice all layers have one, or all but every n-th");
      return;
    }
    const auto has = [&](int64_t i) { return layers[static_cast<size_t>(i)] == "sliding_attention"; };
    int64_t pattern = 0;  // the first layer without a window
    for (int64_t i = 0; i < std::ssize(layers); ++i) {
      if (!has(i) && layers[static_cast<size_t>(i)] != "full_attention")
        return refuse_layers(layers, "layers of this kind are not imported");
      if (!has(i) && pattern == 0) pattern = i + 1;
    }
    if (pattern == 1 && std::count(layers.begin(), layers.end(), "sliding_attention") == 0) return;
    if (window == 0) return refuse_layers(layers, "windows without sliding_window and use_sliding_window");
    if (std::ssize(layers) != count) return refuse_layers(layers, "the list is as long as num_hidden_layers");
    for (int64_t i = 0; i < count; ++i)
      if (has(i) != (pattern == 0 || (i + 1) % pattern != 0))
        return refuse_layers(layers, "in Sluice all layers have a window, or all but every n-th");
    set_window(window, pattern);
  }

  JsonSection top_;
  const std::string& path_;
  HfModel out_;
  bool own_ = false, next_ = false, gpt_ = false;  // model_type sluice, qwen3_next, gpt_oss
};

}  // namespace

HfModel read_hf_config(const std::string& path) {
  return parse_hf_config(parse_strict_json(io::read_file(path, kMaxFileBytes), path), path);
}

HfModel parse_hf_config(const json& root, const std::string& path) {
  if (!root.is_object()) fail(ExitCode::data, "{}: not an object of keys and values", path);
  return Reading(root, path).read();
}

}  // namespace sluice
