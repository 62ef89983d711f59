#include "eval/cached_model.h"

#include <catch2/catch.hpp>

#include "comm/threads.h"
#include "core/host_view.h"
#include "core/parallel_for.h"
#include "eval/batch_generate.h"
#include "eval/tiny_checkpoint.h"
#include "support/model.h"

namespace sluice {
namespace {

constexpr int kKinds = static_cast<int>(EnumNames<AttentionKind>::names.size());

/// Large random weights, so that every position affects the next token, and 400 positions.
struct Tiny {
  test::TinyTraining training;
  std::unique_ptr<TrainedModel> trained;

  explicit Tiny(Precision precision = Precision::f64, AttentionKind kind = AttentionKind::softmax,
                int64_t selected = 0, int64_t positions = 400)
      : training(precision) {
    training.config.model.attention.kind = kind;
    if (selected > 0) {
      training.config.model.attention.sparse.k.base = selected;
      training.config.model.head_dim = 64;
      training.config.model.num_key_value_heads = 2;
    }
    training.config.model.initializer_range = 0.5;
    training.config.model.max_position_embeddings = positions;
    trained = std::make_unique<TrainedModel>(find_checkpoint(test::trained_checkpoint(training, 0)), 64);
  }

  /// The logits after every token, by one pass over all of them.
  std::vector<float> full(const std::vector<int32_t>& tokens) const {
    const auto count = static_cast<int64_t>(tokens.size()), vocab = trained->config().model.vocab_size;
    Arena memory("full", int64_t{1} << 26), host("host");
    Context ctx(int64_t{1} << 26, Device::cpu);
    ForwardBuffers b = make_forward_buffers(*trained, memory, host, count, Recompute::none);
    for (int64_t i = 0; i < count; ++i) {
      b.host.tokens.as<int32_t>()[i] = tokens[static_cast<size_t>(i)];
      b.host.positions.as<int32_t>()[i] = static_cast<int32_t>(i);
      b.host.first_key.as<int32_t>()[i] = 0;
    }
    const Tensor logits = memory.alloc("logits", accumulate_dtype(trained->dtype()), {count, vocab});
    trained->model().forward(ctx, b.batch, b.saved);
    trained->model().logits(ctx, logits, b.saved.hidden);
    std::vector<float> all;
    for (int64_t i = 0; i < logits.numel(); ++i)
      all.push_back(static_cast<float>(test::Pool::get(logits, i)));
    return all;
  }

  /// The most probable continuation, by a full pass for every token.
  std::vector<int32_t> continued(std::vector<int32_t> tokens, int64_t count) const {
    const auto vocab = static_cast<std::ptrdiff_t>(trained->config().model.vocab_size);
    std::vector<int32_t> added;
    for (int64_t i = 0; i < count; ++i) {
      const std::vector<float> logits = full(tokens);
      added.push_back(static_cast<int32_t>(std::max_element(logits.end() - vocab, logits.end()) -
                                           (logits.end() - vocab)));
      tokens.push_back(added.back());
    }
    return added;
  }
};

std::vector<std::vector<int32_t>> continue_all(CachedModel& model, const std::vector<Continuation>& prompts,
                                               int32_t end = -1) {
  std::vector<std::vector<int32_t>> added(prompts.size());
  std::vector<int> done(prompts.size());
  continue_greedily(
      model, prompts,
      [&](int64_t i, int32_t token) {
        added[static_cast<size_t>(i)].push_back(token);
        return token != end;
      },
      [&](int64_t i) {
        ++done[static_cast<size_t>(i)];
        return true;
      });
  CHECK(done == std::vector<int>(prompts.size(), 1));
  return added;
}

}  // namespace

TEST_CASE("a prompt in chunks gives the logits of one pass over it", "[cached_model]") {
  const Tiny tiny;
  const int64_t vocab = 257;
  const std::vector<int32_t> text = test::random_tokens(330, vocab, 3);
  const std::vector<float> expected = tiny.full(text);
  const auto check = [&](std::span<const float> logits, int64_t at) {
    for (int64_t i = 0; i < vocab; ++i)
      REQUIRE(logits[static_cast<size_t>(i)] ==
              Approx(expected[static_cast<size_t>(at * vocab + i)]).margin(1e-5));
  };
  for (const int64_t chunk : {64, 128, 512})
    for (const int64_t length : {1, 2, 63, 64, 65, 128, 129, 200, 300}) {
      INFO("chunks of " << chunk << ", prompt of " << length);
      CachedModel model(*tiny.trained, {.context = 330, .sequences = 2, .chunk = chunk});
      const std::span<const int32_t> tokens(text);
      check(model.prefill(1, tokens.first(static_cast<size_t>(length))), length - 1);
      CHECK(model.length(1) == length);
      // One token by itself, a piece from the middle of a chunk on, and after a step backwards.
      check(model.step(std::vector<CachedModel::Next>{{1, text[static_cast<size_t>(length)]}}), length);
      check(model.prefill(1, tokens.subspan(static_cast<size_t>(length + 1), 20)), length + 20);
      model.truncate(1, length);
      model.copy_sequence(1, 0);
      check(model.step(std::vector<CachedModel::Next>{{0, text[static_cast<size_t>(length)]}}), length);
      check(model.prefill(1, tokens.subspan(static_cast<size_t>(length), 3)), length + 2);
    }
}

TEST_CASE("a cache that is not full needs no more memory for selected keys than a full one",
          "[cached_model]") {
  // Chunks of 64 queries copy the rows of fewer than 64 * 100 / 2 keys, and read them in place where there
  // are more.
  const Tiny tiny(Precision::f32, AttentionKind::sparse, /*selected=*/100, /*positions=*/4000);
  const std::vector<int32_t> text = test::random_tokens(3150, 257, 3);
  CachedModel model(*tiny.trained, {.context = 4000, .sequences = 1, .chunk = 64});
  CHECK(model.prefill(0, text).size() == 257);
  CHECK(model.step(std::vector<CachedModel::Next>{{0, 1}}).size() == 257);
}

TEST_CASE("prompts of different lengths continue together as each does alone", "[cached_model]") {
  const auto kind = static_cast<AttentionKind>(GENERATE(range(0, kKinds)));
  INFO(EnumNames<AttentionKind>::names[static_cast<size_t>(kind)]);
  const Tiny tiny(Precision::f64, kind);
  const std::vector<int32_t> text = test::random_tokens(300, 257, 5);
  std::vector<Continuation> prompts;
  std::vector<std::vector<int32_t>> expected;
  for (const auto& [begin, length, count] :
       {std::tuple{0, 5, 7}, {3, 90, 2}, {10, 1, 12}, {3, 91, 3}, {0, 3, 0}, {50, 64, 5}, {0, 140, 4}}) {
    prompts.push_back({{text.begin() + begin, text.begin() + begin + length}, count});
    expected.push_back(tiny.continued(prompts.back().prompt, count));
  }
  for (const int64_t together : {1, 2, 3, 16}) {
    CachedModel model(*tiny.trained, {.context = 160, .sequences = together, .chunk = 64});
    CHECK(continue_all(model, prompts) == expected);
    CHECK(continue_all(model, prompts) == expected);  // nothing is left of the first time
  }
  // A token that ends its own prompt alone.
  CachedModel model(*tiny.trained, {.context = 160, .sequences = 3, .chunk = 64});
  const int32_t end = expected[0][2];
  for (std::vector<int32_t>& tokens : expected)
    if (const auto at = std::find(tokens.begin(), tokens.end(), end); at != tokens.end())
      tokens.erase(at + 1, tokens.end());
  CHECK(continue_all(model, prompts, end) == expected);
}

TEST_CASE("a prompt that begins like the one before reuses its keys and values, bit for bit",
          "[cached_model]") {
  const Tiny tiny(Precision::f32);
  std::vector<int32_t> first = test::random_tokens(300, 257, 7), second = first;
  second[200] = (second[200] + 1) % 257;
  CachedModel shared(*tiny.trained, {.context = 320, .sequences = 1, .chunk = 64}),
      alone(*tiny.trained, {.context = 320, .sequences = 1, .chunk = 64});
  shared.prefill(0, first);
  shared.truncate(0, 192);
  const std::span<const float> a = shared.prefill(0, std::span(second).subspan(192)),
                               b = alone.prefill(0, second);
  CHECK(std::equal(a.begin(), a.end(), b.begin(), b.end()));
  const std::vector<Continuation> both = {{first, 4}, {second, 4}}, only = {{second, 4}};
  CHECK(continue_all(shared, both)[1] == continue_all(alone, only)[0]);
}

TEST_CASE("memory of a long prompt is that of its cache and one chunk", "[cached_model]") {
  const Tiny tiny(Precision::f32);
  const std::vector<int32_t> text = test::random_tokens(390, 257, 7);
  CachedModel model(*tiny.trained, {.context = 400, .sequences = 1, .chunk = 64});
  model.prefill(0, std::span(text).first(65));
  const int64_t bytes = model.activation_bytes();
  model.prefill(0, std::span(text).subspan(65, 320));
  CHECK(model.activation_bytes() == bytes);
  // Two layers of keys and values, one head of 16 channels.
  CHECK(model.cache_bytes() >= 400 * 2 * 2 * 16 * 4);
  CHECK(model.cache_bytes() < 500 * 2 * 2 * 16 * 4);
  CHECK(model.cache_bytes_per_token() == 2 * 2 * 16 * 4);
}

TEST_CASE("ranks that share a prompt give the logits of one rank", "[cached_model][context]") {
  Tiny tiny;
  ModelConfig& m = tiny.training.config.model;
  SECTION("softmax") {}
  SECTION("a sink and a window") {
    m.attention.kind = AttentionKind::sink;
    m.attention.window = 70;
  }
  SECTION("experts and an extra key") {
    tiny.training.add_experts();
    m.attention.kind = AttentionKind::kv_bias;
    m.attention.gates = {{.position = GatePosition::value}};
  }
  SECTION("selected keys") {
    m.attention.kind = AttentionKind::sparse;
    m.attention.sparse.indexer.rope = true;
    m.attention.sparse.k = {.policy = BudgetPolicy::fixed, .base = 20};
  }
  SECTION("selected blocks of keys") {
    m.attention.kind = AttentionKind::sparse;
    m.attention.sparse.block = 3;
    m.attention.sparse.indexer.rope = true;
    m.attention.sparse.k = {.policy = BudgetPolicy::fixed, .base = 7};
  }
  m.vocab_size = 257;
  const CheckpointInfo checkpoint = find_checkpoint(test::trained_checkpoint(tiny.training, 0));
  std::vector<int32_t> prompt;
  for (int i = 0; i < 393; ++i) prompt.push_back(i * i % 251);
  // A long prompt in chunks, a part of it again, one token, a copy, and steps of two sequences.
  const auto logits_of = [&](Communicator& comm) {
    set_num_threads(1);
    const TrainedModel trained(checkpoint_files(checkpoint), 64, comm.size() > 1 ? &comm : nullptr,
                               CachedModel::kSharedTokens);
    CachedModel model(trained, {.context = 400, .sequences = 2, .chunk = 128});
    std::vector<float> all;
    const auto keep = [&](std::span<const float> logits) {
      all.insert(all.end(), logits.begin(), logits.end());
    };
    keep(model.prefill(0, prompt));
    model.truncate(0, 101);
    keep(model.prefill(0, std::span(prompt).subspan(101, 200)));
    keep(model.prefill(0, std::span(prompt).subspan(301, 1)));
    model.copy_sequence(0, 1);
    keep(model.step(std::vector<CachedModel::Next>{{0, 7}, {1, 9}}));
    keep(model.step(std::vector<CachedModel::Next>{{1, 11}}));
    return all;
  };
  std::vector<float> one;
  run_thread_ranks(1, [&](Communicator& comm) { one = logits_of(comm); });
  REQUIRE(one.size() == 6 * 257);
  for (const int ranks : {2, 4})
    run_thread_ranks(ranks, [&](Communicator& comm) {
      const std::vector<float> shared = logits_of(comm);
      double farthest = 0;
      for (size_t i = 0; i < one.size(); ++i)
        farthest = std::max(farthest, static_cast<double>(std::abs(shared[i] - one[i])));
      if (shared.size() != one.size() || !(farthest < 1e-5))
        fail(ExitCode::internal, "{} ranks: rank {} differs by {}", ranks, comm.rank(), farthest);
    });
}

TEST_CASE("a context beyond the model's positions and a prompt beyond the context are refused",
          "[cached_model]") {
  const Tiny tiny;
  test::expect_error(ExitCode::usage, {"401 tokens is longer than the model's 400 positions"},
                     [&] { CachedModel(*tiny.trained, {.context = 401}); });
  CachedModel model(*tiny.trained, {.context = 20});
  const std::vector<Continuation> prompts = {{std::vector<int32_t>(18, 1), 3}}, empty = {{{}, 3}};
  test::expect_error(ExitCode::usage, {"18 tokens with 3 new ones is longer than the context of 20"},
                     [&] { continue_all(model, prompts); });
  test::expect_error(ExitCode::usage, {"an empty prompt"}, [&] { continue_all(model, empty); });
}

}  // namespace sluice
