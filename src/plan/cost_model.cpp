#include "plan/cost_model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "config/derived.h"
#include "core/dtype.h"
#include "core/error.h"

namespace sluice {
namespace {

/// Expected number of groups, out of `groups` equal parts of the experts, that contain one of a token's K
/// distinct experts, for uniform routing: groups (1 - C(E - E / groups, K) / C(E, K)).
double parts_met(const ScaleModel& m, int64_t groups) {
  const double E = static_cast<double>(m.experts), inside = E / static_cast<double>(groups);
  double missed = 1;
  for (int64_t k = 0; k < m.per_token; ++k)
    missed *= std::max(0.0, E - inside - static_cast<double>(k)) / (E - static_cast<double>(k));
  return static_cast<double>(groups) * (1 - missed);
}

/// Bytes that a GPU sends for the reduce-scatter (or all-gather) of `bytes` among `in_node` GPUs of its node
/// and of each part among `nodes`.
ScaleRow::Bytes shared_by(double bytes, int64_t in_node, int64_t nodes) {
  const auto part = [](double b, int64_t n) {
    return b * static_cast<double>(n - 1) / static_cast<double>(n);
  };
  return {part(bytes, in_node), part(bytes / static_cast<double>(in_node), nodes)};
}

ScaleRow::Bytes operator+(const ScaleRow::Bytes& a, const ScaleRow::Bytes& b) {
  return {a.nvlink + b.nvlink, a.nic + b.nic};
}
ScaleRow::Bytes operator*(double x, const ScaleRow::Bytes& a) { return {x * a.nvlink, x * a.nic}; }

/// `node`: GPUs of a node.
std::string why_not_shared(const ScaleModel& m, const ScaleLayout& l, int64_t node) {
  if (l.context == 1) return "";
  if (m.seq_len % (2 * l.context) != 0)
    return fmt::format("sequences of {} tokens have no {} equal chunks, two for each of {} GPUs", m.seq_len,
                       2 * l.context, l.context);
  if (l.gpus % l.context != 0)
    return fmt::format("{} GPUs cannot be divided into groups of {} that share sequences", l.gpus, l.context);
  if (node % l.context != 0 && l.context % node != 0)
    return fmt::format(
        "a context-parallel group of {} GPUs is neither whole nodes of {} nor an even part of one", l.context,
        node);
  if (l.context % l.expert != 0 && l.expert % l.context != 0)
    return fmt::format("of expert-parallel size {} and context-parallel size {}, neither divides the other",
                       l.expert, l.context);
  return "";
}

std::string why_not(const ScaleModel& m, const ScaleAssumptions& a, const ScaleLayout& l) {
  if (l.gpus < 1 || l.expert < 1 || l.context < 1)
    return fmt::format("{} GPUs, expert-parallel size {}, context-parallel size {}: must be at least 1",
                       l.gpus, l.expert, l.context);
  if (l.zero < 0 || l.zero > 3) return fmt::format("ZeRO {}: must be 0, 1, 2 or 3", l.zero);
  if (m.whole_matrices && l.zero > 0)
    return fmt::format("ZeRO {} shards matrices, which Muon needs whole", l.zero);
  if (l.gpus > a.gpus_per_node && l.gpus % a.gpus_per_node != 0)
    return fmt::format("{} GPUs are not whole nodes of {}", l.gpus, a.gpus_per_node);
  if (l.expert > 1 && m.experts == 0)
    return fmt::format("a model without experts cannot use expert-parallel size {}", l.expert);
  if (m.experts > 0 && m.experts % l.expert != 0)
    return fmt::format("expert-parallel size {} does not divide {} experts", l.expert, m.experts);
  if (l.gpus % l.expert != 0)
    return fmt::format("{} GPUs cannot be divided into expert-parallel groups of {}", l.gpus, l.expert);
  const int64_t node = std::min(l.gpus, a.gpus_per_node);
  if (node % l.expert != 0 && l.expert % node != 0)
    return fmt::format(
        "an expert-parallel group of {} GPUs is neither whole nodes of {} nor an even part of one", l.expert,
        node);
  if (const std::string why = why_not_shared(m, l, node); !why.empty()) return why;
  const int64_t groups = l.gpus / l.context, at_once = groups * m.micro_batch;
  const std::string of =
      l.context > 1 ? fmt::format("{} groups of {} GPUs", groups, l.context) : fmt::format("{} GPUs", l.gpus);
  if (m.samples < at_once)
    return fmt::format("train.global_batch_size = {} is smaller than a micro-batch of {} on each of {}",
                       m.samples, m.micro_batch, of);
  if (m.samples % at_once != 0)
    return fmt::format(
        "train.global_batch_size = {} is not a multiple of {} x micro-batches of {}; nearest {} or {}",
        m.samples, of, m.micro_batch, m.samples / at_once * at_once, (m.samples / at_once + 1) * at_once);
  return "";
}

/// Placement of the replicas of a parameter: number per node, and number of nodes.
struct Replicas {
  int64_t in_node, nodes;
  int64_t all() const { return in_node * nodes; }
};

struct Replication {
  Replicas dense, expert;
  Replication(const ScaleAssumptions& a, const ScaleLayout& l) {
    const int64_t node = std::min(l.gpus, a.gpus_per_node);
    dense = {node, l.gpus / node};
    const int64_t in_node = std::max<int64_t>(1, node / l.expert);
    expert = {in_node, l.gpus / l.expert / in_node};
  }
  /// Traffic of a GPU for reducing or gathering all its elements once, with the given bytes per element.
  ScaleRow::Bytes traffic(const ScaleModel& m, const ScaleLayout& l, int64_t bytes) const {
    const auto b = static_cast<double>(bytes);
    return shared_by(b * static_cast<double>(m.dense), dense.in_node, dense.nodes) +
           shared_by(b * static_cast<double>(m.expert) / static_cast<double>(l.expert), expert.in_node,
                     expert.nodes);
  }
};

void add_memory(ScaleRow& row, const ScaleModel& m, const Replication& r) {
  const ScaleLayout& l = row.layout;
  const double here =
      static_cast<double>(m.dense) + static_cast<double>(m.expert) / static_cast<double>(l.expert);
  const double share = static_cast<double>(m.dense) / static_cast<double>(r.dense.all()) +
                       static_cast<double>(m.expert) / static_cast<double>(l.expert * r.expert.all());
  // One block in computation, one in transit, and the parameters outside of blocks.
  const double block = static_cast<double>(m.block_dense) +
                       static_cast<double>(m.block_expert) / static_cast<double>(l.expert);
  const double units = std::min(here, 2 * block + static_cast<double>(m.around));
  row.weights = static_cast<double>(m.weight_bytes) * (l.zero == 3 ? share + units : here);
  row.gradients = static_cast<double>(m.gradient_bytes) * (l.zero >= 2 ? share + units : here);
  row.optimizer = m.optimizer_bytes * (l.zero >= 1 ? share : here);
  row.activations =
      static_cast<double>(l.context > 1 ? m.shared_activation_bytes.at(l.context) : m.activation_bytes);
  // Rows of tokens sent, and received.
  if (l.expert > 1)
    row.activations += 2.0 * static_cast<double>(m.micro_batch * m.seq_len / l.context * m.per_token *
                                                 m.hidden * m.weight_bytes);
}

/// Keys and values, and their gradients, among GPUs that share sequences.
void add_context(ScaleRow& row, const ScaleModel& m, const ScaleAssumptions& a) {
  const int64_t n = row.layout.context;
  if (n == 1) return;
  const int64_t nodes = std::max<int64_t>(1, n / std::min(row.layout.gpus, a.gpus_per_node)),
                in_node = n / nodes;
  const auto samples = static_cast<double>(row.micro_batches * m.micro_batch);
  const double whole = samples * static_cast<double>(m.seq_len * m.key_value_bytes);
  const ScaleRow::Bytes gathered = m.key_value_gathers * shared_by(whole, in_node, nodes);
  // Every GPU sends to every other one what it has found for its tokens.
  const ScaleRow::Bytes scattered =
      whole / static_cast<double>(n) *
      ScaleRow::Bytes{static_cast<double>(in_node - 1), static_cast<double>(n - in_node)};
  // Of every sample and layer two chunks of keys, and two of values.
  const double start = samples * static_cast<double>(4 * m.layers * (nodes > 1 ? 2 : 1)) * 1e-6 * a.hop_us;
  const auto seconds = [&](const ScaleRow::Bytes& b, double times) {
    return b.nvlink / (1e9 * a.nvlink_gb_s) + b.nic / (1e9 * a.nic_gb_s) + times * start;
  };
  row.context_bytes = gathered + scattered;
  const double gather = seconds(gathered, m.key_value_gathers), scatter = seconds(scattered, 1);
  row.context = gather + scatter;
  row.shown_context = (1 - a.hidden_context) * gather + scatter;
}

void add_all_to_all(ScaleRow& row, const ScaleModel& m, const ScaleAssumptions& a) {
  const ScaleLayout& l = row.layout;
  if (l.expert == 1) return;
  const int64_t nodes = std::max<int64_t>(1, l.expert / std::min(l.gpus, a.gpus_per_node)),
                in_node = l.expert / nodes;
  const double tokens = static_cast<double>(m.samples * m.seq_len) / static_cast<double>(l.gpus);
  const double passes = static_cast<double>(m.passes * m.layers_with_experts);
  const double row_bytes = tokens * passes * static_cast<double>(m.hidden * m.weight_bytes);
  row.all_to_all_bytes = {
      row_bytes * parts_met(m, l.expert) * static_cast<double>(in_node - 1) / static_cast<double>(in_node),
      row_bytes * parts_met(m, nodes) * static_cast<double>(nodes - 1) / static_cast<double>(nodes)};
  // Both links work at the same time, in a pipeline.
  row.all_to_all = std::max(row.all_to_all_bytes.nvlink / (1e9 * a.nvlink_gb_s),
                            row.all_to_all_bytes.nic / (1e9 * a.nic_gb_s)) +
                   passes * static_cast<double>(row.micro_batches * (nodes > 1 ? 2 : 1)) * 1e-6 * a.hop_us;
  row.shown_all_to_all = (1 - a.hidden_all_to_all) * row.all_to_all;
}

void add_exchange(ScaleRow& row, const ScaleModel& m, const ScaleAssumptions& a, const Replication& r,
                  double forward, double backward) {
  const auto seconds = [&](const ScaleRow::Bytes& b) {
    return b.nvlink / (1e9 * a.nvlink_gb_s) + b.nic / (1e9 * a.nic_gb_s);
  };
  const auto times = static_cast<double>(row.micro_batches);
  const int64_t zero = row.layout.zero;
  // Without ZeRO the sums are all-gathered, which makes the reduction an all-reduce.
  const double reductions = zero == 0 ? 2 : zero == 1 ? 1 : times;
  const double gathers = zero == 0 ? 0 : zero == 3 ? 2 * times : 1;
  row.reduce_bytes = reductions * r.traffic(m, row.layout, a.gradient_bytes);
  row.gather_bytes = gathers * r.traffic(m, row.layout, m.weight_bytes);
  row.reduce = seconds(row.reduce_bytes);
  row.gather = seconds(row.gather_bytes);
  // Gradients are complete in the last backward pass and weights are needed in the first forward pass; with
  // ZeRO 2 and 3, in every pass.
  const double beside_backward = a.hidden_backward * backward * (zero >= 2 ? times : 1);
  const double beside_forward = a.hidden_forward * forward * (zero == 3 ? times : 1);
  const double in_backward = zero == 3 ? row.gather / 2 : 0;
  const double in_forward = row.gather - in_backward;
  const double late_gather = std::max(0.0, in_backward - beside_backward);
  row.shown_gather = std::max(0.0, in_forward - beside_forward) + late_gather;
  row.shown_reduce = std::max(0.0, row.reduce - std::max(0.0, beside_backward - in_backward));
}

const char* link(const ScaleRow::Bytes& b, const ScaleAssumptions& a) {
  return b.nic / a.nic_gb_s > b.nvlink / a.nvlink_gb_s ? "NIC" : "NVLink";
}

std::string bound(const ScaleRow& row, const ScaleAssumptions& a, bool link_is_full) {
  if (!row.fits) return "memory: does not fit";
  if (link_is_full) return "the NIC: always busy";
  if (row.efficiency() >= 0.9) return "compute";
  const double most = std::max({row.shown_reduce, row.shown_gather, row.shown_all_to_all, row.shown_context});
  if (most == row.shown_reduce) return fmt::format("gradients over {}", link(row.reduce_bytes, a));
  if (most == row.shown_gather) return fmt::format("weights over {}", link(row.gather_bytes, a));
  if (most == row.shown_context) return fmt::format("keys and values over {}", link(row.context_bytes, a));
  return fmt::format("all-to-all over {}", link(row.all_to_all_bytes, a));
}

}  // namespace

ScaleModel scale_model(const Plan& plan, const std::vector<int64_t>& contexts) {
  const Config& c = plan.config;
  if (c.lora.rank > 0)
    fail(ExitCode::usage, "lora.rank = {}: adapters have no row in this table; use 0", c.lora.rank);
  if (plan.frozen > 0)
    fail(ExitCode::usage,
         "optimizer.rules freeze {} of {} parameters, and what is frozen has no row in this table; train all",
         plan.frozen, plan.total);
  ScaleModel m;
  std::map<int, std::pair<int64_t, int64_t>> blocks;
  for (const Plan::Parameter& p : plan.parameters) {
    (p.of_expert ? m.expert : m.dense) += p.count;
    if (p.unit == 0) {
      m.around += p.count;
      continue;
    }
    (p.of_expert ? blocks[p.unit].second : blocks[p.unit].first) += p.count;
  }
  for (const auto& [unit, block] : blocks)
    if (block.first + block.second > m.block_dense + m.block_expert)
      std::tie(m.block_dense, m.block_expert) = block;
  m.flops_per_token = plan.flops_per_token;
  m.forward_share = plan.flops.forward() / plan.flops_per_token;
  m.again = plan.recomputed / plan.flops.forward();
  const MoeConfig& moe = c.model.moe;
  if (plan.dispatch) {
    m.experts = moe.num_experts;
    m.per_token = moe.num_experts_per_tok;
    m.layers_with_experts = plan.dispatch->layers;
    // Either the whole block is recomputed, or the tokens are sent again to the experts' first product.
    m.passes = c.train.recompute == Recompute::block ? 6 : c.train.recompute == Recompute::mlp ? 5 : 4;
  }
  m.hidden = c.model.hidden_size;
  m.samples = c.train.global_batch_size;
  m.micro_batch = c.train.micro_batch_size;
  m.seq_len = c.data.seq_len;
  const DType dtype = storage_dtype(c.train.precision);
  m.weight_bytes = dtype_size(dtype);
  m.gradient_bytes = dtype_size(accumulate_dtype(dtype));
  m.optimizer_bytes =
      static_cast<double>(2 * m.gradient_bytes + (m.weight_bytes < m.gradient_bytes ? m.gradient_bytes : 0));
  Config alone = c;
  alone.parallel = {};
  alone.parallel.determinism = c.parallel.determinism;
  alone.parallel.exact_sum = c.parallel.exact_sum;
  const MemoryPlan memory = Trainer::measure(alone);
  if (m.whole_matrices = c.optimizer.type == OptimizerType::muon; m.whole_matrices)
    m.optimizer_bytes = static_cast<double>(memory.optimizer) / static_cast<double>(m.dense + m.expert);
  m.activation_bytes = memory.activations + memory.scratch;
  for (const int64_t context : contexts) {
    if (context < 2 || m.seq_len % (2 * context) != 0) continue;
    alone.parallel.context = context;
    const auto ranks = make_dry_communicator(0, static_cast<int>(context));
    const MemoryPlan shared = Trainer::measure(alone, ranks.get());
    m.shared_activation_bytes[context] = shared.activations + shared.scratch;
  }
  const AttentionConfig& attention = c.model.attention;
  const int64_t index_width = attention.kind == AttentionKind::sparse ? attention.sparse.indexer.head_dim : 0;
  m.layers = c.model.num_hidden_layers;
  m.key_value_bytes =
      m.layers * (2 * c.model.num_key_value_heads * c.model.head_dim + index_width) * m.weight_bytes;
  if (c.train.recompute == Recompute::block)
    m.key_value_gathers += static_cast<double>(m.layers - 1) / static_cast<double>(m.layers);
  return m;
}

void check_assumptions(const ScaleAssumptions& a) {
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, double>>{
           {"peak TFLOP/s", a.peak_tflops},
           {"NVLink GB/s", a.nvlink_gb_s},
           {"NIC GB/s", a.nic_gb_s},
           {"memory GiB", a.memory_gib},
           {"fraction of the peak on one GPU", a.gpu_mfu},
           {"GPUs per node", static_cast<double>(a.gpus_per_node)}})
    if (!(value > 0)) fail(ExitCode::usage, "{} must be above 0, got {}", name, value);
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, double>>{
           {"fraction of the peak on one GPU", a.gpu_mfu},
           {"share of the backward pass", a.hidden_backward},
           {"share of the forward pass", a.hidden_forward},
           {"hidden share of an all-to-all", a.hidden_all_to_all},
           {"hidden share of the all-gathers of keys and values", a.hidden_context}})
    if (!(value >= 0 && value <= 1)) fail(ExitCode::usage, "{} must be in [0, 1], got {}", name, value);
  if (!(a.hop_us >= 0)) fail(ExitCode::usage, "microseconds of a hop must not be negative, got {}", a.hop_us);
  if (a.gradient_bytes != 2 && a.gradient_bytes != 4)
    fail(ExitCode::usage, "gradients travel as bf16 (2 bytes) or f32 (4), got {} bytes", a.gradient_bytes);
}

ScaleRow scale(const ScaleModel& m, const ScaleAssumptions& a, const ScaleLayout& layout) {
  check_assumptions(a);
  ScaleRow row;
  row.layout = layout;
  row.refused = why_not(m, a, layout);
  if (!row.refused.empty()) return row;
  row.micro_batches = m.samples * layout.context / layout.gpus / m.micro_batch;
  const auto gpus = static_cast<double>(layout.gpus), tokens = static_cast<double>(m.samples * m.seq_len);
  const double counted = tokens / gpus * m.flops_per_token / (1e12 * a.peak_tflops * a.gpu_mfu);
  row.compute = counted * (1 + m.again * m.forward_share);
  const double forward = counted * m.forward_share / static_cast<double>(row.micro_batches);
  const double backward = row.compute / static_cast<double>(row.micro_batches) - forward;
  const Replication replication(a, layout);
  add_memory(row, m, replication);
  add_all_to_all(row, m, a);
  add_context(row, m, a);
  add_exchange(row, m, a, replication, forward, backward);
  row.step = row.compute + row.shown_reduce + row.shown_gather + row.shown_all_to_all + row.shown_context;
  // Even if hidden, transfers on one link do not overlap each other.
  const double nic = row.bytes().nic / (1e9 * a.nic_gb_s);
  const bool full = nic > row.step;
  row.step = std::max(row.step, nic);
  row.tokens_per_second = tokens / row.step;
  row.mfu = row.tokens_per_second / gpus * m.flops_per_token / (1e12 * a.peak_tflops);
  row.fits = row.memory() <= a.memory_gib * static_cast<double>(int64_t{1} << 30);
  row.bound = bound(row, a, full);
  return row;
}

const ScaleRow* best_layout(const std::vector<ScaleRow>& rows) {
  const ScaleRow* best = nullptr;
  for (const ScaleRow& row : rows)
    if (row.fits && (!best || row.tokens_per_second > best->tokens_per_second)) best = &row;
  return best;
}

}  // namespace sluice
