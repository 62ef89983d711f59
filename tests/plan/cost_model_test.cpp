// The estimated cost of a step on many GPUs: calculations by hand, monotonicity, refusals. No cluster was
// measured.
#include "plan/cost_model.h"

#include <catch2/catch.hpp>

#include "config/load.h"
#include "core/error.h"

using namespace sluice;
using Catch::Contains;

namespace {

/// Round numbers: a unit of 10^9 parameters is one second of something.
ScaleModel small_model() {
  ScaleModel m;
  m.dense = 8'000'000'000;
  m.expert = 16'000'000'000;
  m.block_dense = 500'000'000;
  m.block_expert = 1'000'000'000;
  m.around = 200'000'000;
  m.experts = 4;
  m.per_token = 1;
  m.layers_with_experts = 2;
  m.hidden = 1000;
  m.flops_per_token = 3e9;
  m.samples = 16;
  m.micro_batch = 1;
  m.seq_len = 1000;
  m.activation_bytes = 1'000'000'000;
  return m;
}

ScaleAssumptions small_machines() {
  ScaleAssumptions a;
  a.peak_tflops = 1;
  a.gpu_mfu = 0.5;
  a.nvlink_gb_s = 1;
  a.nic_gb_s = 0.5;
  a.gpus_per_node = 4;
  a.memory_gib = 200;
  a.hidden_backward = 0.5;
  a.hidden_forward = 0.25;
  a.hidden_all_to_all = 0.5;
  a.hop_us = 1000;
  a.gradient_bytes = 4;
  return a;
}

std::string shipped(const std::string& name) { return std::string(SLUICE_SOURCE_DIR "/configs/") + name; }

/// The paper's mixture of experts at its own batch, without recomputation.
ScaleModel paper() {
  return scale_model(
      make_plan(load_config(shipped("gated_attention/base_15a2b.yaml"), {"train.recompute=none"})));
}

}  // namespace

TEST_CASE("the cost of a step on eight GPUs equals a calculation by hand", "[scale]") {
  // Two nodes of four GPUs, expert parallel 2 within a node. A GPU has 2,000 tokens in two micro-batches.
  const ScaleRow r = scale(small_model(), small_machines(), {.gpus = 8, .expert = 2, .zero = 1});
  REQUIRE(r.refused.empty());
  CHECK(r.micro_batches == 2);
  CHECK(r.compute == Approx(12));  // 2,000 x 3e9 / (0.5 x 1e12): 2 s forward and 4 s backward a micro-batch
  // Dense: 32 GB, of which 24 leave for the node's others and half of the remaining 8 for the other node.
  // Experts: 32 GB, 16 and 8.
  CHECK(r.reduce_bytes.nvlink == Approx(24e9 + 16e9));
  CHECK(r.reduce_bytes.nic == Approx(4e9 + 8e9));
  CHECK(r.reduce == Approx(40 + 24));
  CHECK(r.shown_reduce == Approx(64 - 0.5 * 4));
  // Weights are half as wide.
  CHECK(r.gather == Approx(32));
  CHECK(r.shown_gather == Approx(32 - 0.25 * 2));
  // 2,000 tokens, four times through two layers; half of them stay. Eight times a hop of 1 ms in each of two
  // micro-batches.
  CHECK(r.all_to_all_bytes.nvlink == Approx(2000 * 8 * 2000 * 0.5));
  CHECK(r.all_to_all_bytes.nic == 0);
  CHECK(r.all_to_all == Approx(0.016 + 0.016));
  CHECK(r.shown_all_to_all == Approx(0.016));
  CHECK(r.step == Approx(12 + 62 + 31.5 + 0.016));
  CHECK(r.step_without_overlap() == Approx(12 + 64 + 32 + 0.032));
  CHECK(r.efficiency() == Approx(12 / 105.516));
  CHECK(r.tokens_per_second == Approx(16000 / 105.516));
  CHECK(r.mfu == Approx(0.5 * 12 / 105.516));
  CHECK(r.weights == Approx(2 * 16e9));
  CHECK(r.gradients == Approx(4 * 16e9));
  CHECK(r.optimizer == Approx(12 * (1e9 + 2e9)));         // an eighth of the dense, an eighth of all experts
  CHECK(r.activations == Approx(1e9 + 2 * 1000 * 2000));  // rows that leave, rows that come
  CHECK(r.fits);
  CHECK(r.bound == "gradients over NVLink");
}

TEST_CASE("traffic, memory and overlap of each ZeRO stage", "[scale]") {
  const ScaleModel m = small_model();
  const ScaleAssumptions a = small_machines();
  const auto stage = [&](int64_t zero) { return scale(m, a, {.gpus = 8, .expert = 2, .zero = zero}); };
  // 0: gradients are all-reduced, overlapping the same backward pass.
  CHECK(stage(0).reduce == Approx(128));
  CHECK(stage(0).shown_reduce == Approx(126));
  CHECK(stage(0).gather == 0);
  CHECK(stage(0).optimizer == Approx(12 * 16e9));
  // 2: both micro-batches are reduced, each beside its own backward pass. A block (500M + 500M) computes,
  // another is on its way; 200M lie around them.
  CHECK(stage(2).reduce == Approx(128));
  CHECK(stage(2).shown_reduce == Approx(128 - 2 * 2));
  CHECK(stage(2).gather == Approx(32));
  CHECK(stage(2).gradients == Approx(4 * (3e9 + 2.2e9)));
  CHECK(stage(2).weights == Approx(2 * 16e9));
  // 3: weights come twice a micro-batch; the second time they come before the gradients leave.
  CHECK(stage(3).gather == Approx(4 * 32));
  CHECK(stage(3).shown_gather == Approx((64 - 0.25 * 2 * 2) + (64 - 0.5 * 4 * 2)));
  CHECK(stage(3).shown_reduce == Approx(128));
  CHECK(stage(3).weights == Approx(2 * (3e9 + 2.2e9)));
  for (int64_t zero = 1; zero < 4; ++zero) CHECK(stage(zero).memory() < stage(zero - 1).memory());
}

TEST_CASE("a token crosses to another node once, however many of its experts are there", "[scale]") {
  ScaleModel m = small_model();
  ScaleAssumptions a = small_machines();
  a.hop_us = 0;
  // All four experts for every token, one on each of four GPUs in two nodes.
  m.per_token = 4;
  a.gpus_per_node = 2;
  const double row = 2000.0 * 8 * 2000;
  ScaleRow r = scale(m, a, {.gpus = 8, .expert = 4, .zero = 1});
  CHECK(r.all_to_all_bytes.nic == Approx(row * 1));     // of two nodes, one is another
  CHECK(r.all_to_all_bytes.nvlink == Approx(row * 2));  // in each of two nodes, one of two GPUs is another
  CHECK(r.all_to_all == Approx(std::max(2 * row / 1e9, row / 0.5e9)));
  // Two of four: a node of two holds neither with chance (2 1)/(4 3), a GPU misses them with (3 2)/(4 3).
  m.per_token = 2;
  r = scale(m, a, {.gpus = 8, .expert = 4, .zero = 1});
  CHECK(r.all_to_all_bytes.nic == Approx(row * 2 * (1 - 2.0 / 12) / 2));
  CHECK(r.all_to_all_bytes.nvlink == Approx(row * 4 * (1 - 6.0 / 12) / 2));
  a.hop_us = 1000;
  CHECK(scale(m, a, {.gpus = 8, .expert = 4, .zero = 1}).all_to_all ==
        Approx(r.all_to_all + 8 * 2 * 2 * 1e-3));
}

TEST_CASE("GPUs that share sequences gather keys and values, and scatter their gradients", "[scale]") {
  ScaleModel m = small_model();
  m.experts = m.expert = m.block_expert = 0;
  m.layers = 2;
  m.seq_len = 2000;
  m.key_value_bytes = 100;
  m.key_value_gathers = 3;
  m.shared_activation_bytes = {{2, 600'000'000}, {4, 400'000'000}, {8, 300'000'000}};
  ScaleAssumptions a = small_machines();
  a.hidden_context = 0.5;
  const ScaleRow alone = scale(m, a, {.gpus = 8, .expert = 1, .zero = 1}),
                 in_node = scale(m, a, {.gpus = 8, .expert = 1, .zero = 1, .context = 4}),
                 across = scale(m, a, {.gpus = 8, .expert = 1, .zero = 1, .context = 8});
  // 16 samples of 2,000 tokens: 8 for each of two groups, one at a time. Of 8 x 200,000 bytes a GPU gathers
  // three quarters, three times, and sends a quarter to each of three others.
  REQUIRE(in_node.refused.empty());
  CHECK(in_node.micro_batches == 8);
  CHECK(in_node.compute == Approx(alone.compute));
  CHECK(in_node.context_bytes.nvlink == Approx(16e5 * (3 * 0.75 + 0.75)));
  CHECK(in_node.context_bytes.nic == 0);
  const double start = 8 * 2 * 4 * 1e-3;  // of 8 samples and 2 layers, two chunks of keys and two of values
  CHECK(in_node.context == Approx(16e5 * 3 * 0.75 / 1e9 + 3 * start + 16e5 * 0.75 / 1e9 + start));
  CHECK(in_node.shown_context == Approx((16e5 * 3 * 0.75 / 1e9 + 3 * start) / 2 + 16e5 * 0.75 / 1e9 + start));
  CHECK(in_node.reduce_bytes.nvlink == Approx(alone.reduce_bytes.nvlink));
  CHECK(in_node.activations == 400'000'000);
  CHECK(in_node.weights == alone.weights);
  CHECK(in_node.step_without_overlap() ==
        Approx(in_node.compute + in_node.reduce + in_node.gather + in_node.context));
  // Two nodes of four: half of a quarter comes from the other node, and half of what is scattered goes there.
  CHECK(across.context_bytes.nvlink == Approx(32e5 * (3 * 0.75 + 3.0 / 8)));
  CHECK(across.context_bytes.nic == Approx(32e5 * (3 * 0.25 / 2 + 4.0 / 8)));
  CHECK(across.activations == 300'000'000);

  const auto why = [&](const ScaleLayout& l) { return scale(m, a, l).refused; };
  CHECK_THAT(why({8, 1, 1, 3}), Contains("2000 tokens have no 6 equal chunks, two for each of 3 GPUs"));
  CHECK_THAT(why({4, 1, 1, 250}), Contains("4 GPUs cannot be divided into groups of 250"));
  CHECK_THAT(why({8, 1, 1, 0}), Contains("context-parallel size 0: must be at least 1"));
  m.samples = 1;
  CHECK_THAT(why({8, 1, 1, 4}), Contains("a micro-batch of 1 on each of 2 groups of 4 GPUs"));
  CHECK(why({8, 1, 1, 8}).empty());
  m.experts = 12;
  m.expert = 12;
  m.samples = 16;
  a.gpus_per_node = 12;
  m.seq_len = 24000;
  CHECK_THAT(why({12, 6, 1, 4}), Contains("of expert-parallel size 6 and context-parallel size 4, neither"));
  CHECK_THAT(why({24, 1, 1, 8}), Contains("a context-parallel group of 8 GPUs is neither whole nodes of 12"));
}

TEST_CASE("what GPUs share of a sequence is measured, and its keys and values are counted", "[scale]") {
  const Plan plan = make_plan(load_config(shipped("long_context/gate_32k.yaml")));
  const ModelConfig& model = plan.config.model;
  const ScaleModel m = scale_model(plan, {1, 4, 8, 3});
  CHECK(m.shared_activation_bytes.size() == 2);
  CHECK(m.key_value_bytes == model.num_hidden_layers * 2 * model.num_key_value_heads * model.head_dim * 2);
  REQUIRE(plan.config.train.recompute == Recompute::block);
  CHECK(m.key_value_gathers == Approx(2 + 27.0 / 28));  // all blocks but the last compute again
  const ScaleRow one = scale(m, {}, {64, 1, 1}), four = scale(m, {}, {64, 1, 1, 4}),
                 eight = scale(m, {}, {64, 1, 1, 8});
  CHECK(four.activations < 0.4 * one.activations);
  CHECK(eight.activations < 0.65 * four.activations);
  CHECK(eight.micro_batches == 2 * four.micro_batches);
  CHECK(four.efficiency() < one.efficiency());
  const MemoryPlan shared = make_plan(load_config(shipped("long_context/gate_32k_context_8.yaml")), 8).memory;
  CHECK(eight.activations == static_cast<double>(shared.activations + shared.scratch));
}

TEST_CASE("a saturated link determines the step time, whatever is hidden", "[scale]") {
  ScaleAssumptions a = small_machines();
  a.nvlink_gb_s = 1e9;
  a.nic_gb_s = 1;
  a.gpus_per_node = 2;
  a.memory_gib = 1e6;
  a.hop_us = 0;
  a.hidden_backward = a.hidden_forward = a.hidden_all_to_all = 1;
  ScaleModel m = small_model();
  m.per_token = 4;
  m.samples = 8;
  m.flops_per_token = 16.5e9;  // 11 s forward, 22 s backward
  const auto row = [&] { return scale(m, a, {.gpus = 8, .expert = 4, .zero = 1}); };
  // 12 GB of dense gradients and 8 of experts' hide; 6 and 4 of weights too.
  CHECK(row().reduce_bytes.nic == Approx(12e9 + 8e9));
  CHECK(row().step == Approx(33));
  CHECK(row().bound == "compute");
  m.hidden = 6'250'000;  // 100 GB of rows to the other node
  CHECK(row().step == Approx(20 + 10 + 100));
  CHECK(row().bound == "the NIC: always busy");
}

TEST_CASE("faster machines, smaller gradients and larger batches never cost more", "[scale]") {
  const ScaleModel m = paper();
  const auto check = [&](const ScaleModel& better, const ScaleAssumptions& a, const char* what) {
    INFO(what);
    for (const int64_t gpus : {64, 512, 1024})
      for (const int64_t expert : {1, 4, 8, 16, 32})
        for (int64_t zero = 0; zero < 4; ++zero) {
          const ScaleRow before = scale(m, {}, {gpus, expert, zero}),
                         after = scale(better, a, {gpus, expert, zero});
          CHECK(after.efficiency() >= Approx(before.efficiency()));
          CHECK(before.step <= Approx(before.step_without_overlap()));
          CHECK(before.mfu <= 0.42);
        }
  };
  const auto with = [](auto change) {
    ScaleAssumptions a;
    change(a);
    return a;
  };
  check(m, with([](auto& a) { a.nic_gb_s *= 2; }), "NIC");
  check(m, with([](auto& a) { a.nvlink_gb_s *= 2; }), "NVLink");
  check(m, with([](auto& a) { a.hop_us = 0; }), "hop");
  check(m, with([](auto& a) { a.hidden_backward = a.hidden_forward = a.hidden_all_to_all = 1; }), "overlap");
  ScaleModel larger = m;
  larger.micro_batch *= 2;
  larger.samples *= 2;
  check(larger, {}, "batch");
  ScaleAssumptions wide;
  wide.gradient_bytes = 4;
  for (const int64_t gpus : {64, 512, 1024})
    CHECK(scale(m, wide, {gpus, 8, 1}).step >= scale(m, {}, {gpus, 8, 1}).step);
  CHECK(scale(m, wide, {1024, 8, 1}).efficiency() < 0.8 * scale(m, {}, {1024, 8, 1}).efficiency());
  // More GPUs: more tokens per second, less memory each, a smaller fraction of the peak.
  for (const int64_t gpus : {64, 128, 256, 512}) {
    const ScaleRow few = scale(m, {}, {gpus, 8, 1}), many = scale(m, {}, {2 * gpus, 8, 1});
    CHECK(many.tokens_per_second > few.tokens_per_second);
    CHECK(many.memory() < few.memory());
    CHECK(many.mfu < few.mfu);
  }
}

TEST_CASE("parameters are counted on the real store, and memory agrees with the trainer", "[scale]") {
  const Plan plan = make_plan(load_config(shipped("gated_attention/base_15a2b.yaml")));
  const ScaleModel m = scale_model(plan);
  CHECK(m.dense + m.expert == plan.total);
  CHECK(m.expert == int64_t{24} * 128 * 3 * 768 * 2048);
  CHECK(m.block_expert == int64_t{128} * 3 * 768 * 2048);
  CHECK(m.around == int64_t{2} * 151936 * 2048 + 2048);
  CHECK(m.passes == 6);
  CHECK(m.again > 0.75);  // blocks; the output head is not recomputed
  CHECK(m.again < 1 - 311'164'928.0 / static_cast<double>(plan.matmul_parameters) / 2);
  CHECK(paper().again == 0);
  CHECK(paper().passes == 4);
  // One GPU without sharding has the memory of the single rank that the trainer measures.
  const ScaleRow one = scale(m, {}, {.gpus = 1, .expert = 1, .zero = 0});
  CHECK(one.optimizer == Approx(static_cast<double>(plan.memory.optimizer)).epsilon(1e-3));
  CHECK(one.gradients == Approx(static_cast<double>(plan.memory.gradients)).epsilon(1e-3));
  CHECK(one.activations == static_cast<double>(plan.memory.activations + plan.memory.scratch));
  CHECK(one.reduce + one.gather + one.all_to_all == 0);
  CHECK_FALSE(one.fits);
  CHECK(one.bound == "memory: does not fit");
  const ScaleModel dense = scale_model(make_plan(load_config(shipped("gated_attention/base_28l.yaml"))));
  CHECK(dense.expert == 0);
  CHECK(scale(dense, {}, {64, 1, 1}).all_to_all == 0);
}

TEST_CASE("a step takes the forward pass that is computed again, whatever its share", "[scale]") {
  ScaleModel m = small_model();
  m.again = 0.5;
  const ScaleLayout one = {.gpus = 1, .expert = 1, .zero = 0};
  const double third = scale(m, small_machines(), one).compute;
  CHECK(third == Approx(16 * 1000 * 3e9 / 0.5e12 * (1 + 0.5 / 3)));
  m.forward_share = 0.8;
  CHECK(scale(m, small_machines(), one).compute == Approx(third / (1 + 0.5 / 3) * (1 + 0.5 * 0.8)));
  // Recomputed are the blocks but the last: of an indexer that scores every key, too.
  const std::vector<std::string> sparse = {"train.recompute=block", "data.seq_len=131072",
                                           "train.global_batch_size=64"};
  for (const std::string file : {"gated_attention/base_28l", "sparse/table4_02_sparse_only"}) {
    INFO(file);
    const Plan plan = make_plan(load_config(shipped(file + ".yaml"), sparse));
    const ScaleModel of_plan = scale_model(plan);
    const double head = 2.0 * 151936 * 2048, forward = plan.flops.forward();
    const auto layers = static_cast<double>(plan.config.model.num_hidden_layers);
    CHECK(of_plan.again * forward == Approx((forward - head) * (layers - 1) / layers));
    CHECK(of_plan.forward_share * plan.flops_per_token == Approx(forward));
    CHECK((of_plan.forward_share > 0.34) == (file != "gated_attention/base_28l"));
  }
}

TEST_CASE("the table's activations are those of its own layouts, not the configuration's", "[scale]") {
  const auto activations = [](const std::string& file, int64_t ranks, std::vector<std::string> overrides) {
    overrides.push_back("train.check_limits=false");
    return scale_model(make_plan(load_config(shipped(file), overrides), ranks)).activation_bytes;
  };
  CHECK(activations("long_context/gate_32k_context_8.yaml", 8, {}) ==
        activations("long_context/gate_32k.yaml", 1, {}));
  const std::string experts = "gated_attention/base_15a2b.yaml";
  const int64_t whole = activations(experts, 1, {});
  CHECK(activations(experts, 8, {"parallel.expert=8", "parallel.zero_stage=1"}) == whole);
  CHECK(activations(experts, 8, {"parallel.expert=8", "parallel.expert_capacity=8"}) == whole);
}

TEST_CASE("the best layout is the fastest one that fits", "[scale]") {
  const ScaleModel m = paper();
  std::vector<ScaleRow> rows;
  for (const int64_t expert : {1, 8, 16, 32}) rows.push_back(scale(m, {}, {512, expert, 1}));
  rows.push_back(scale(m, {}, {504, 3, 1}));  // refused
  const ScaleRow* best = best_layout(rows);
  REQUIRE(best);
  CHECK(best->layout.expert == 16);
  for (const ScaleRow& row : rows) CHECK((!row.fits || row.tokens_per_second <= best->tokens_per_second));
  ScaleAssumptions small;
  small.memory_gib = 8;
  CHECK(best_layout({scale(m, small, {1024, 16, 0})}) == nullptr);
  const std::string text = scale_text(m, {}, rows);
  CHECK_THAT(text, Contains("nothing is measured") && Contains("assumed") && Contains("989 TFLOP/s"));
  CHECK_THAT(text, Contains("refused: expert-parallel size 3 does not divide 128 experts"));
  CHECK_THAT(text, Contains("best of these: 512 GPUs, expert parallel 16, ZeRO 1"));
  const nlohmann::json json = scale_json(m, {}, rows);
  CHECK(json["measured"] == false);
  CHECK(json["best"]["expert_parallel"] == 16);
  CHECK(json["layouts"].size() == rows.size());
  CHECK(json["layouts"][2]["seconds"]["step"] == best->step);
}

TEST_CASE("impossible layouts are refused with the reason", "[scale]") {
  const ScaleModel m = paper();
  const auto why = [&](const ScaleModel& model, const ScaleLayout& l) { return scale(model, {}, l).refused; };
  CHECK_THAT(why(m, {100, 4, 1}), Contains("100 GPUs are not whole nodes of 8"));
  CHECK_THAT(why(m, {64, 12, 1}), Contains("expert-parallel size 12 does not divide 128 experts"));
  CHECK_THAT(why(m, {24, 16, 1}), Contains("24 GPUs cannot be divided into expert-parallel groups of 16"));
  CHECK_THAT(
      why(m, {2048, 8, 1}),
      Contains("train.global_batch_size = 1024 is smaller than a micro-batch of 1 on each of 2048 GPUs"));
  CHECK_THAT(why(m, {384, 8, 1}),
             Contains("is not a multiple of 384 GPUs x micro-batches of 1; nearest 768 or 1152"));
  CHECK_THAT(why(m, {64, 8, 4}), Contains("ZeRO 4"));
  CHECK_THAT(why(m, {0, 1, 1}), Contains("0 GPUs"));
  ScaleModel dense = small_model();
  dense.experts = dense.expert = 0;
  CHECK_THAT(why(dense, {8, 2, 1}), Contains("a model without experts cannot use expert-parallel size 2"));
  ScaleModel odd = m;
  odd.experts = 12;
  odd.samples = 1536;
  CHECK_THAT(why(odd, {24, 12, 1}),
             Contains("an expert-parallel group of 12 GPUs is neither whole nodes of 8 nor"));
  const auto refused = [&](auto change) {
    ScaleAssumptions a;
    change(a);
    try {
      scale(m, a, {64, 8, 1});
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::usage);
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK_THAT(refused([](auto& a) { a.nic_gb_s = 0; }), Contains("NIC GB/s must be above 0, got 0"));
  CHECK_THAT(refused([](auto& a) { a.hidden_backward = 1.5; }),
             Contains("share of the backward pass must be in [0, 1]"));
  CHECK_THAT(refused([](auto& a) { a.gradient_bytes = 3; }), Contains("got 3 bytes"));
}
