#include <spdlog/fmt/fmt.h>

#include "plan/cost_model.h"

namespace sluice {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

std::string layout_text(const ScaleLayout& l) {
  return fmt::format("{} GPUs{}{}, ZeRO {}", l.gpus,
                     l.expert > 1 ? fmt::format(", expert parallel {}", l.expert) : "",
                     l.context > 1 ? fmt::format(", context parallel {}", l.context) : "", l.zero);
}

std::string tokens_text(double per_second) {
  return per_second >= 1e6 ? fmt::format("{:.1f}M", per_second / 1e6)
                           : fmt::format("{:.0f}k", per_second / 1e3);
}

/// Milliseconds of a transfer in isolation, and the part that is not hidden behind computation.
std::string shown_text(double all, double shown) {
  return fmt::format("{:.0f}/{:.0f}", 1e3 * all, 1e3 * shown);
}

}  // namespace

std::string scale_text(const ScaleModel& m, const ScaleAssumptions& a, const std::vector<ScaleRow>& rows) {
  std::string out = "\non many GPUs: estimates of an analytic model; nothing is measured\n";
  const auto line = [&](const char* name, const std::string& text) {
    out += fmt::format("  {:<12}{}\n", name, text);
  };
  line("counted",
       fmt::format(
           "{:.3f}B parameters outside the experts, {:.3f}B in them; {:.4g} FLOPs per token{}",
           1e-9 * static_cast<double>(m.dense), 1e-9 * static_cast<double>(m.expert), m.flops_per_token,
           m.again > 0 ? fmt::format(", {:.0f} % of the forward pass recomputed", 100 * m.again) : ""));
  line("", fmt::format("{} samples of {} tokens per step, in micro-batches of {}; {:.2f} GiB of activations "
                       "and workspace (a dry run)",
                       m.samples, m.seq_len, m.micro_batch, static_cast<double>(m.activation_bytes) / kGiB));
  line("assumed",
       fmt::format("a GPU: peak {:g} TFLOP/s, {:g} % of it achieved by a single GPU, {:g} GiB; {} per node",
                   a.peak_tflops, 100 * a.gpu_mfu, a.memory_gib, a.gpus_per_node));
  line("", fmt::format("links, achieved, each way and GPU: NVLink {:g} GB/s, NIC {:g} GB/s; {:g} us a hop of "
                       "an all-to-all, or of keys or values",
                       a.nvlink_gb_s, a.nic_gb_s, a.hop_us));
  line("", fmt::format("hidden: gradients beside {:g} % of the last backward pass (of each, from ZeRO 2), "
                       "weights beside {:g} % of the",
                       100 * a.hidden_backward, 100 * a.hidden_forward));
  line("", fmt::format("first forward pass (of each pass, with ZeRO 3), {:g} % of all-to-alls, {:g} % of the "
                       "all-gathers of keys and values",
                       100 * a.hidden_all_to_all, 100 * a.hidden_context));
  line("", fmt::format("gradients travel in {}; experts are loaded evenly; layouts beyond this program's are "
                       "on paper only",
                       a.gradient_bytes == 2 ? "bf16" : "f32"));
  out += fmt::format(
      "\n  {:>5} {:>6} {:>7} {:>4} {:>5} | {:>7} {:>9} {:>9} {:>10} {:>9} {:>7} | {:>6} {:>6} | {:>7} {:>6} "
      "{:>6} {:>6} {:>6} | {:>4} {:>6} {:>5} {:>7}  {}\n",
      "GPUs", "expert", "context", "ZeRO", "micro", "compute", "reduce", "gather", "all-to-all", "K and V",
      "step", "NVLink", "NIC", "weights", "grads", "optim", "activ", "total", "eff.", "(none)", "MFU",
      "tok/s", "bound by");
  out += fmt::format("  {:>31} | {:>56} | {:>13} | {:>35} | {:>5} {:>6} {:>5}\n", "", "ms: alone/not hidden",
                     "GB sent", "GiB of a GPU", "%", "%", "%");
  for (const ScaleRow& r : rows) {
    const ScaleLayout& l = r.layout;
    if (!r.refused.empty()) {
      out += fmt::format("  {:>5} {:>6} {:>7} {:>4}         refused: {}\n", l.gpus, l.expert, l.context,
                         l.zero, r.refused);
      continue;
    }
    out += fmt::format(
        "  {:>5} {:>6} {:>7} {:>4} {:>5} | {:>7.0f} {:>9} {:>9} {:>10} {:>9} {:>7.0f} | {:>6.2f} {:>6.2f} | "
        "{:>7.1f} "
        "{:>6.1f} {:>6.1f} {:>6.1f} {:>6.1f} | {:>4.0f} "
        "{:>6.0f} {:>5.1f} {:>7}  {}\n",
        l.gpus, l.expert, l.context, l.zero, r.micro_batches, 1e3 * r.compute,
        shown_text(r.reduce, r.shown_reduce), shown_text(r.gather, r.shown_gather),
        shown_text(r.all_to_all, r.shown_all_to_all), shown_text(r.context, r.shown_context), 1e3 * r.step,
        1e-9 * r.bytes().nvlink, 1e-9 * r.bytes().nic, r.weights / kGiB, r.gradients / kGiB,
        r.optimizer / kGiB, r.activations / kGiB, r.memory() / kGiB, 100 * r.efficiency(),
        100 * r.efficiency_without_overlap(), 100 * r.mfu, tokens_text(r.tokens_per_second), r.bound);
  }
  if (const ScaleRow* best = best_layout(rows))
    out += fmt::format(
        "\n  best of these: {}: {} tokens/s expected, {:.1f} % of the peak, {:.1f} of {:g} GiB; bound by "
        "{}\n",
        layout_text(best->layout), tokens_text(best->tokens_per_second), 100 * best->mfu,
        best->memory() / kGiB, a.memory_gib, best->bound);
  else
    out += "\n  best of these: none fits\n";
  return out;
}

nlohmann::json scale_json(const ScaleModel& m, const ScaleAssumptions& a, const std::vector<ScaleRow>& rows) {
  const auto bytes = [](const ScaleRow::Bytes& b) {
    return nlohmann::json{{"nvlink", b.nvlink}, {"nic", b.nic}};
  };
  const auto layout = [](const ScaleLayout& l) {
    return nlohmann::json{{"gpus", l.gpus},
                          {"expert_parallel", l.expert},
                          {"context_parallel", l.context},
                          {"zero_stage", l.zero}};
  };
  nlohmann::json list = nlohmann::json::array();
  for (const ScaleRow& r : rows) {
    nlohmann::json j = layout(r.layout);
    if (!r.refused.empty()) {
      j["refused"] = r.refused;
    } else {
      j.update({{"micro_batches", r.micro_batches},
                {"seconds",
                 {{"compute", r.compute},
                  {"reduce", r.reduce},
                  {"gather", r.gather},
                  {"all_to_all", r.all_to_all},
                  {"context", r.context},
                  {"reduce_not_hidden", r.shown_reduce},
                  {"gather_not_hidden", r.shown_gather},
                  {"all_to_all_not_hidden", r.shown_all_to_all},
                  {"context_not_hidden", r.shown_context},
                  {"step", r.step},
                  {"step_without_overlap", r.step_without_overlap()}}},
                {"bytes_sent",
                 {{"reduce", bytes(r.reduce_bytes)},
                  {"gather", bytes(r.gather_bytes)},
                  {"all_to_all", bytes(r.all_to_all_bytes)},
                  {"context", bytes(r.context_bytes)}}},
                {"memory",
                 {{"weights", r.weights},
                  {"gradients", r.gradients},
                  {"optimizer", r.optimizer},
                  {"activations", r.activations},
                  {"total", r.memory()},
                  {"fits", r.fits}}},
                {"efficiency", r.efficiency()},
                {"efficiency_without_overlap", r.efficiency_without_overlap()},
                {"mfu", r.mfu},
                {"tokens_per_second", r.tokens_per_second},
                {"bound", r.bound}});
    }
    list.push_back(std::move(j));
  }
  const ScaleRow* best = best_layout(rows);
  return {{"measured", false},
          {"assumptions",
           {{"peak_tflops", a.peak_tflops},
            {"gpu_mfu", a.gpu_mfu},
            {"nvlink_gb_s", a.nvlink_gb_s},
            {"nic_gb_s", a.nic_gb_s},
            {"gpus_per_node", a.gpus_per_node},
            {"memory_gib", a.memory_gib},
            {"hidden_backward", a.hidden_backward},
            {"hidden_forward", a.hidden_forward},
            {"hidden_all_to_all", a.hidden_all_to_all},
            {"hidden_context", a.hidden_context},
            {"hop_us", a.hop_us},
            {"gradient_bytes", a.gradient_bytes}}},
          {"counted",
           {{"dense_parameters", m.dense},
            {"expert_parameters", m.expert},
            {"flops_per_token", m.flops_per_token},
            {"computed_again", m.again},
            {"activation_bytes", m.activation_bytes}}},
          {"layouts", std::move(list)},
          {"best", best ? layout(best->layout) : nlohmann::json()}};
}

}  // namespace sluice
