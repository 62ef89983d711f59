// Losses that live from step to step, as one: in which order they are called, what they report and keep, and
// which names in a checkpoint's state.json they read.
#include "nn/step_loss.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/state_reader.h"
#include "core/error.h"
#include "nn/step_losses.h"
#include "ops/elementwise.h"

using namespace sluice;

namespace {

/// What two made-up losses add to, and the calls that reached them.
struct Calls {
  std::vector<std::string> parts;
};
std::vector<std::string> calls;

template <char kName>
struct Recorded {
  explicit Recorded(const Config& config) : seed(config.train.seed) {}
  void allocate(const StepMemory& memory) { note("allocate " + std::to_string(memory.tokens)); }
  void add_to(Calls& load) const { load.parts.push_back({kName}); }
  bool asks_ranks() const { return asks; }
  void begin_step(Context&) { note("begin_step"); }
  void end_micro_batch(Context&, int64_t i) { note("end_micro_batch " + std::to_string(i)); }
  void fetch(Context&) { note("fetch"); }
  void collect(Communicator&, int64_t tokens) { note("collect " + std::to_string(tokens)); }
  void applied(Context&) { note("applied"); }
  std::vector<StepScalar> scalars() const { return {{.name = {kName}, .value = 1}, {.name = {kName, '2'}}}; }
  void save(nlohmann::json& state) const { state[std::string{kName}] = seed; }
  void restore(const StateReader& state) { note("restore " + std::to_string(state.integer({kName}, 0))); }
  void note(const std::string& call) { calls.push_back(std::string{kName} + " " + call); }

  int64_t seed;
  static inline bool asks = false;
};

/// One that does as little as it may.
struct Least : NoStepLoss {
  explicit Least(const Config&) {}
  void allocate(const StepMemory&) {}
  void add_to(Calls&) const {}
  void fetch(Context&) {}
  void collect(Communicator&, int64_t) {}
  std::vector<StepScalar> scalars() const { return {}; }
};

struct ReportsNothing : NoStepLoss {
  explicit ReportsNothing(const Config&) {}
  void allocate(const StepMemory&) {}
  void add_to(Calls&) const {}
  void fetch(Context&) {}
  void collect(Communicator&, int64_t) {}
};

static_assert(StepLoss<Recorded<'a'>, Calls> && StepLoss<Least, Calls>);
static_assert(!StepLoss<ReportsNothing, Calls> && !StepLoss<Least, StepLoad>);

/// Two layers of three experts, counted over steps; room for all that any loss may take.
struct Counting {
  explicit Counting(BalanceScope scope, int64_t experts = 3) {
    config.model.num_hidden_layers = 2;
    config.model.num_attention_heads = 4;
    config.model.moe.num_experts = experts;
    config.model.moe.load_balance.scope = scope;
  }
  void allocate(StepLosses& losses) {
    losses.allocate({.device = memory,
                     .host = memory,
                     .ranks = *ranks,
                     .sequences = nullptr,
                     .micro_batches = 1,
                     .tokens = 8,
                     .losses = DType::f32});
  }
  Config config;
  Arena memory{"test", 1 << 16};
  std::unique_ptr<Communicator> ranks = make_local_communicator();
  Context ctx{64};
};

nlohmann::json saved(const StepLosses& losses) {
  nlohmann::json state;
  losses.save(state);
  return state;
}

const nlohmann::json kPrevious = {4, 0, 2, 1, 3, 2};

}  // namespace

TEST_CASE("every loss of the list is called in order at every point of a step", "[step_loss]") {
  calls.clear();
  Config config;
  config.train.seed = 7;
  StepLossTuple<Calls, Recorded<'a'>, Least, Recorded<'b'>> losses(config);
  Arena memory("test");
  const auto ranks = make_local_communicator();
  Context ctx(64);
  losses.allocate({.device = memory,
                   .host = memory,
                   .ranks = *ranks,
                   .sequences = nullptr,
                   .micro_batches = 2,
                   .tokens = 5,
                   .losses = DType::f32});
  CHECK(losses.load().parts == std::vector<std::string>{"a", "b"});
  losses.begin_step(ctx);
  losses.end_micro_batch(ctx, 1);
  losses.fetch(ctx);
  losses.collect(*ranks, 99);
  losses.applied(ctx);
  nlohmann::json state;
  losses.save(state);
  CHECK(state == nlohmann::json{{"a", 7}, {"b", 7}});
  losses.restore(StateReader(state, "state.json"));
  std::vector<std::string> expected;
  for (const char* call :
       {"allocate 5", "begin_step", "end_micro_batch 1", "fetch", "collect 99", "applied", "restore 7"})
    for (const char* name : {"a ", "b "}) expected.push_back(std::string(name) + call);
  CHECK(calls == expected);

  std::string names;
  for (const StepScalar& scalar : losses.scalars()) names += scalar.name + " ";
  CHECK(names == "a a2 b b2 ");
  CHECK_FALSE(losses.asks_ranks());
  Recorded<'b'>::asks = true;
  CHECK(losses.asks_ranks());
  Recorded<'b'>::asks = false;
  CHECK(losses.get<Recorded<'b'>>().seed == 7);
}

TEST_CASE("a loss that is not configured needs no memory, has no state and reports nothing", "[step_loss]") {
  Counting dense(BalanceScope::global_batch, 0);
  StepLosses losses(dense.config);
  dense.allocate(losses);
  CHECK(dense.memory.used() == 0);
  losses.begin_step(dense.ctx);
  losses.end_micro_batch(dense.ctx, 0);
  losses.fetch(dense.ctx);
  losses.collect(*dense.ranks, 8);
  losses.applied(dense.ctx);
  CHECK(losses.scalars().empty());
  CHECK_FALSE(losses.asks_ranks());
  CHECK(saved(losses).is_null());
}

TEST_CASE("Routers' counts of the step before are kept where the step was applied", "[step_loss][moe]") {
  Counting t(BalanceScope::previous_step);
  StepLosses losses(t.config);
  t.allocate(losses);
  const RouterLoad load = losses.load().routers;
  losses.begin_step(t.ctx);
  const std::vector<double> counts = kPrevious;
  for (int64_t l = 0; l < 2; ++l)
    for (int64_t e = 0; e < 3; ++e) load.layer(l).as<double>()[e] = counts[static_cast<size_t>(3 * l + e)];
  losses.fetch(t.ctx);
  losses.collect(*t.ranks, 8);
  CHECK(saved(losses)["router"]["previous"] == nlohmann::json(std::vector<double>(6, 0.0)));
  losses.applied(t.ctx);
  CHECK(saved(losses)["router"]["previous"] == kPrevious);
  CHECK(std::vector<double>(load.previous.as<double>(), load.previous.as<double>() + 6) == counts);
}

TEST_CASE("Routers' counts are read under the name of today and under that of older checkpoints",
          "[step_loss][moe]") {
  const auto restored = [](const nlohmann::json& state, BalanceScope scope = BalanceScope::previous_step) {
    Counting t(scope);
    StepLosses losses(t.config);
    t.allocate(losses);
    losses.restore(StateReader(state, "state.json"));
    return saved(losses);
  };
  const nlohmann::json today = {{"router", {{"previous", kPrevious}, {"layers", nlohmann::json::array()}}}};
  CHECK(restored(today)["router"]["previous"] == kPrevious);
  // What watches over the routers was a list beside them.
  const nlohmann::json older = {{"routers", {{"previous", kPrevious}}},
                                {"router", nlohmann::json::array({1})}};
  CHECK(restored(older)["router"]["previous"] == kPrevious);
  const nlohmann::json none(std::vector<double>(6, 0.0));
  for (const nlohmann::json& state :
       {nlohmann::json::object(), nlohmann::json{{"router", nlohmann::json::array({1})}},
        nlohmann::json{{"router", {{"layers", nlohmann::json::array()}}}}})
    CHECK(restored(state)["router"]["previous"] == none);
  CHECK(restored(today, BalanceScope::micro_batch).is_null());
  for (const char* name : {"router", "routers"}) {
    CHECK_THROWS_WITH(
        restored({{name, {{"previous", {1, 2}}}}}),
        Catch::Contains(std::string("state.json: ") + name + ".previous must be a list of 6, got 2"));
    CHECK_THROWS_AS(restored({{name, 5}}), Error);
  }
}

namespace {

/// Two layers of four heads. A row: four sums of importance, tokens, batches, and the sum of their loss.
struct Heads {
  explicit Heads(const HeadBalanceConfig& balance, int64_t batches = 2, int64_t samples = 8)
      : micro_batches(batches) {
    config.model.num_hidden_layers = 2;
    config.model.num_attention_heads = 4;
    config.model.attention.head_balance = balance;
    config.train.global_batch_size = samples;
    losses.emplace(config);
    losses->allocate({.device = memory,
                      .host = memory,
                      .ranks = *ranks,
                      .sequences = nullptr,
                      .micro_batches = micro_batches,
                      .tokens = 8,
                      .losses = DType::f32});
  }
  void step(const std::vector<double>& rows) {
    losses->begin_step(ctx);
    const Tensor totals = losses->load().heads.totals;
    std::copy(rows.begin(), rows.end(), totals.as<double>());
    losses->fetch(ctx);
    losses->collect(*ranks, 8);
    losses->applied(ctx);
  }
  static std::vector<double> numbers(const Tensor& t) { return {t.as<double>(), t.as<double>() + t.numel()}; }
  std::vector<double> previous() const { return numbers(losses->load().heads.reduced); }
  std::vector<double> shared() const { return numbers(losses->load().heads.shared); }
  void restore(const nlohmann::json& state) { losses->restore(StateReader(state, "state.json")); }

  int64_t micro_batches;
  Config config;
  Arena memory{"test", 1 << 16};
  std::unique_ptr<Communicator> ranks = make_local_communicator();
  Context ctx{64};
  std::optional<StepLosses> losses;
};

const std::vector<double> kHeadRows = {1, 4, 3, 2, 60, 2, 0.5, 9, 8, 7, 6, 60, 2, 0.5};

}  // namespace

TEST_CASE("shared heads follow the samples and the number of heads that are asked for on resuming",
          "[step_loss][heads]") {
  const std::vector<double> none(8, 1.0), one = {0, 1, 0, 0, 1, 0, 0, 0}, two = {0, 1, 1, 0, 1, 1, 0, 0};
  const auto balance = [](int64_t shared_heads, int64_t samples) {
    return HeadBalanceConfig{
        .coefficient = 0.1, .shared_heads = shared_heads, .calibration_samples = samples};
  };
  Heads before(balance(1, 16)), too_few(balance(1, 500));
  for (Heads* heads : {&before, &too_few}) {
    heads->step(kHeadRows);
    CHECK(heads->shared() == none);
    heads->step(kHeadRows);
  }
  REQUIRE(before.shared() == one);
  REQUIRE(too_few.shared() == none);
  const auto resumed = [&](const Heads& from, int64_t shared_heads, int64_t samples, int64_t steps = 0) {
    Heads heads(balance(shared_heads, samples));
    heads.restore(saved(*from.losses));
    for (int64_t i = 0; i < steps; ++i) heads.step(kHeadRows);
    return heads.shared();
  };
  CHECK(resumed(before, 1, 16) == one);
  CHECK(resumed(before, 2, 16) == two);
  CHECK(resumed(before, 2, 16, 1) == two);
  CHECK(resumed(too_few, 1, 500) == none);
  for (const int64_t steps : {0, 1}) {
    CHECK(resumed(too_few, 1, 8, steps) == one);
    CHECK(resumed(too_few, 2, 16, steps) == two);
    CHECK(resumed(before, 1, 24, steps) == (steps == 0 ? none : one));
  }
}

TEST_CASE("the previous step's heads weigh the same on another layout, and for another number of samples",
          "[step_loss][heads]") {
  const HeadBalanceConfig balance = {.coefficient = 0.1, .scope = HeadBalanceScope::previous_step};
  Heads before(balance);
  before.step(kHeadRows);
  const nlohmann::json state = saved(*before.losses);
  const auto batches = [&](const nlohmann::json& from, int64_t micro_batches, int64_t samples = 8) {
    Heads heads(balance, micro_batches, samples);
    heads.restore(from);
    const std::vector<double> rows = heads.previous();
    std::vector<double> expected = kHeadRows;
    expected[5] = rows[5], expected[12] = rows[12];
    CHECK(rows == expected);
    CHECK(rows[5] == rows[12]);
    if (samples == 8) CHECK(saved(*heads.losses) == state);
    return rows[5];
  };
  CHECK(batches(state, 2) == 2);
  CHECK(batches(state, 1) == 1);
  CHECK(batches(state, 8) == 8);
  // head_balance divides by the tokens of the step before: half of those of a step of twice the samples.
  CHECK(batches(state, 4, 16) == 2);
  // Older checkpoints have the batches themselves, and are read as they were.
  nlohmann::json older = state;
  older["heads"]["previous"] = kHeadRows;
  older["heads"].erase("previous_in_samples");
  CHECK(batches(older, 2) == 2);
}
