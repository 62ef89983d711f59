// Expert parallelism with ranks as threads: every rank's results and gradients have the same bits as on a
// single rank, for any routing and any number of rounds.
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <mutex>

#include "comm/reduce.h"
#include "comm/threads.h"
#include "ops/elementwise.h"
#include "support/enums.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::Pool;

struct Case {
  int64_t experts = 8, per_token = 3, tokens = 37, hidden = 24, width = 10;
  int64_t shared = 0;
  bool shared_gate = false;
  DType dtype = DType::f32;
  double capacity = 2;
  bool keep_inner = true;
  int64_t favourites = 0;  // number of first experts that every token goes to
  BalanceScope scope = BalanceScope::micro_batch;
  bool gpt_oss = false;  // biases and clamped SwiGLU

  ModelConfig model() const {
    ModelConfig c = test::tiny_config();
    c.hidden_size = hidden;
    c.moe.num_experts = experts;
    c.moe.num_experts_per_tok = per_token;
    c.moe.moe_intermediate_size = width;
    c.moe.shared_expert_intermediate_size = shared;
    c.moe.shared_expert_gate = shared_gate;
    c.moe.load_balance = {.coefficient = 0.3, .scope = scope};
    c.moe.router_z_loss_coefficient = 0.2;
    c.moe.bias = gpt_oss;
    if (gpt_oss) c.moe.swiglu_limit = 0.5;
    return c;
  }
};

/// One rank's layer, with memory of exactly the measured size.
class RankMoe {
 public:
  RankMoe(const Case& c, const ExpertRanks& ranks = {}, int grad_sources = 1)
      : grad_sources_(grad_sources), config_(c.model()), moe_(config_, store, "mlp", 0, ranks), case_(c) {
    Context dry(0);
    Arena v("values"), g("gradients"), a("activations");
    build(dry, v, g, a);
    pass(dry, {});
    values_ = std::make_unique<Arena>("values", v.high_water());
    grads_ = std::make_unique<Arena>("gradients", g.high_water());
    activations_ = std::make_unique<Arena>("activations", a.high_water());
    context = std::make_unique<Context>(dry.scratch.high_water());
    build(*context, *values_, *grads_, *activations_);
    store.initialize(*context, 1234);
    for (size_t i = 0; i < store.specs().size(); ++i)  // biases start at 0, and each expert's is another
      if (const ParamSpec& spec = store.specs()[i]; spec.name.ends_with(".bias"))
        for (int64_t j = 0; j < spec.numel(); ++j)
          Pool::set(store.value(static_cast<ParamStore::Id>(i)), j,
                    std::sin(static_cast<double>(std::hash<std::string>()(spec.name) % 100 + 7 * j)));
    for (int64_t e = 0; e < c.favourites; ++e)
      Pool::set(store.value(0), e * c.hidden, 40.0 - 3.0 * static_cast<double>(e));  // channel 0 of x is 1
    store.pack(*context);
    fill(*context, totals, 0);
  }

  /// Tokens of a micro-batch and their outputs; gradients are accumulated.
  void run(int batch, const RouterLoad& load = {}) {
    Pool pool(static_cast<uint32_t>(100 + batch));
    cast(*context, x, pool.normal(DType::f64, {case_.tokens, case_.hidden}));
    cast(*context, dy, pool.normal(DType::f64, {case_.tokens, case_.hidden}));
    for (int64_t t = 0; t < case_.tokens; ++t) Pool::set(x, t * case_.hidden, 1);
    pass(*context, load);
  }
  void pass(Context& ctx, const RouterLoad& load) {
    moe_.forward(ctx, x, load, saved);
    moe_.backward(ctx, dx, dy, x, load, saved);
  }
  const Moe& moe() const { return moe_; }
  const ModelConfig& config() const { return config_; }

  ParamStore store;
  std::unique_ptr<Context> context;
  Moe::Saved saved;
  Tensor x, dx, dy, totals, counts;

 private:
  void build(Context& ctx, Arena& v, Arena& g, Arena& a) {
    store.allocate(ctx, case_.dtype, case_.tokens, v, &g, {.grad_sources = grad_sources_});
    saved = moe_.make_saved(a, "moe", case_.tokens, case_.dtype, case_.keep_inner);
    for (Tensor* t : {&x, &dx, &dy}) *t = a.alloc("x", case_.dtype, {case_.tokens, case_.hidden});
    totals = a.alloc("totals", DType::f64, {1, router_totals_size(case_.experts)});
    counts = a.alloc("counts", DType::f64, {1, case_.experts});
  }

  int grad_sources_;
  ModelConfig config_;
  Moe moe_;
  Case case_;
  std::unique_ptr<Arena> values_, grads_, activations_;
};

/// Collects failures of the ranks, because Catch is not thread-safe.
class Findings {
 public:
  void check(bool ok, const std::string& what) {
    const std::lock_guard lock(mutex_);
    ++checks_;
    if (!ok) wrong_.push_back(what);
  }
  void same(const std::string& what, const Tensor& a, const Tensor& b) {
    check(a.bytes() == b.bytes() && std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0, what);
  }
  ~Findings() {
    std::string all;
    for (const std::string& what : wrong_) all += what + "\n";
    INFO(all);
    CHECK(wrong_.empty());
    CHECK(checks_ > 0);
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> wrong_;
  int64_t checks_ = 0;
};

bool is_zero(const Tensor& t) {
  for (int64_t i = 0; i < t.numel(); ++i)
    if (Pool::get(t, i) != 0) return false;
  return true;
}

/// Gradients of all parameters of `part` against those of the same names.
void same_gradients(Findings& findings, const std::string& who, const ParamStore& part,
                    const ParamStore& whole, bool of_expert) {
  for (size_t i = 0; i < part.specs().size(); ++i) {
    if (part.specs()[i].of_expert() != of_expert) continue;
    for (size_t j = 0; j < whole.specs().size(); ++j)
      if (whole.specs()[j].name == part.specs()[i].name)
        findings.same(who + part.specs()[i].name, part.grad(static_cast<ParamStore::Id>(i)),
                      whole.grad(static_cast<ParamStore::Id>(j)));
  }
}

/// Two micro-batches of each rank, against every one computed alone. The expert gradients are those of all
/// ranks' tokens, one rank after the other. Returns the extra rounds.
int64_t check_bits(const Case& c, int ranks) {
  const test::OneThread one_thread;
  std::vector<std::unique_ptr<RankMoe>> alone;
  RankMoe sum(c);
  for (int pass = 0; pass < 2; ++pass)
    for (int r = 0; r < ranks; ++r) {
      sum.run(2 * r + pass);
      alone.push_back(std::make_unique<RankMoe>(c));
      alone.back()->run(2 * r + pass);
    }
  std::vector<int64_t> rounds(static_cast<size_t>(ranks), 0);
  Findings findings;
  run_thread_ranks(ranks, [&](Communicator& comm) {
    set_num_threads(1);
    RankMoe mine(c, {&comm, c.capacity});
    int64_t& extra = rounds[static_cast<size_t>(comm.rank())];
    findings.check(mine.store.total() < sum.store.total() || ranks == 1, "experts of others are registered");
    for (int pass = 0; pass < 2; ++pass) {
      const std::string who = fmt::format("rank {} of {}, pass {}: ", comm.rank(), ranks, pass);
      const RankMoe& one = *alone[static_cast<size_t>(pass * ranks + comm.rank())];
      for (size_t i = 0; i < mine.store.specs().size(); ++i)
        if (!mine.store.specs()[i].of_expert())
          fill(*mine.context, mine.store.grad(static_cast<ParamStore::Id>(i)), 0);
      mine.run(2 * comm.rank() + pass, {.extra_rounds = &extra});
      findings.same(who + "y", mine.saved.y, one.saved.y);
      findings.same(who + "dx", mine.dx, one.dx);
      same_gradients(findings, who, mine.store, one.store, false);
      findings.check(!is_zero(mine.saved.y) && !is_zero(mine.dx) && !is_zero(mine.store.grad(0)),
                     who + "all zero");
    }
    same_gradients(findings, fmt::format("rank {} of {}: ", comm.rank(), ranks), mine.store, sum.store, true);
    findings.check(mine.context->scratch.used() == 0, "scratch is not given back");
  });
  for (const int64_t extra : rounds) CHECK(extra == rounds[0]);
  return rounds[0];
}

}  // namespace

TEST_CASE("expert parallelism gives the bits of a single rank", "[moe][ranks]") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
    for (const bool keep_inner : {true, false})
      for (const auto& [shared, gate] :
           std::vector<std::pair<int64_t, bool>>{{0, false}, {5, false}, {5, true}})
        for (const int ranks : {1, 2, 4}) {
          INFO(dtype_name(dtype) << ", " << (keep_inner ? "kept" : "computed again") << ", shared " << shared
                                 << ", gate " << gate << ", " << ranks << " ranks");
          const Case c{.shared = shared, .shared_gate = gate, .dtype = dtype, .keep_inner = keep_inner};
          CHECK(check_bits(c, ranks) == 0);
        }
}

TEST_CASE("expert parallelism gives the bits of a single rank with biases of experts", "[moe][ranks]") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
    for (const bool keep_inner : {true, false})
      for (const double capacity : {2.0, 0.2})
        for (const int ranks : {2, 4, 8}) {
          INFO(dtype_name(dtype) << ", " << (keep_inner ? "kept" : "computed again") << ", capacity "
                                 << capacity << ", " << ranks << " ranks");
          check_bits({.dtype = dtype, .capacity = capacity, .keep_inner = keep_inner, .gpt_oss = true},
                     ranks);
        }
}

TEST_CASE("rows beyond the receive-buffer capacity take extra rounds, with the same bits", "[moe][ranks]") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
    for (const bool keep_inner : {true, false})
      for (const int ranks : {2, 4}) {
        INFO(dtype_name(dtype) << ", " << (keep_inner ? "kept" : "computed again") << ", " << ranks
                               << " ranks");
        // All to the experts of rank 0, whose capacity is one run of 37 rows, three of them, or all.
        Case c{.per_token = 2, .dtype = dtype, .keep_inner = keep_inner, .favourites = 2};
        for (const auto& [capacity, rounds] : std::vector<std::pair<double, int64_t>>{
                 {0.1, 2 * ranks}, {1.5, (2 * ranks + 2) / 3}, {static_cast<double>(ranks), 1}}) {
          INFO("capacity " << capacity);
          c.capacity = capacity;
          CHECK(check_bits(c, ranks) == 2 * (rounds - 1));  // of two micro-batches
        }
      }
}

TEST_CASE("gradients of experts are kept separate by source rank", "[moe][ranks]") {
  const test::OneThread one_thread;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
    for (const int ranks : {2, 4})
      for (const double capacity : {2.0, 0.2}) {
        INFO(dtype_name(dtype) << ", " << ranks << " ranks, capacity " << capacity);
        const Case c{.dtype = dtype, .gpt_oss = capacity < 1};
        std::vector<std::unique_ptr<RankMoe>> alone;
        for (int r = 0; r < ranks; ++r) {
          alone.push_back(std::make_unique<RankMoe>(c));
          alone.back()->run(r);
        }
        Findings findings;
        run_thread_ranks(ranks, [&](Communicator& comm) {
          set_num_threads(1);
          RankMoe mine(c, {&comm, capacity}, ranks);
          mine.run(comm.rank());
          for (size_t i = 0; i < mine.store.specs().size(); ++i) {
            const ParamSpec& spec = mine.store.specs()[i];
            if (!spec.of_expert() || spec.joined) continue;
            for (int source = 0; source < ranks; ++source) {
              const ParamStore& whole = alone[static_cast<size_t>(source)]->store;
              const auto id = std::find_if(whole.specs().begin(), whole.specs().end(),
                                           [&](const ParamSpec& s) { return s.name == spec.name; });
              // The experts of a rank are also contiguous in the store of all experts.
              Tensor expected = mine.store.joined_grad(static_cast<ParamStore::Id>(i), source);
              const Tensor found = expected;
              expected.data = whole.grad(static_cast<ParamStore::Id>(id - whole.specs().begin())).data;
              findings.same(fmt::format("rank {}, tokens of {}: {}", comm.rank(), source, spec.name), found,
                            expected);
              findings.check(!is_zero(found), "zero");
            }
          }
        });
      }
}

TEST_CASE("edge-case shapes of expert parallelism", "[moe][ranks]") {
  SECTION("one expert on a rank, more per token than a rank has") {
    for (const int64_t per_token : {1, 3, 4})
      check_bits({.experts = 4, .per_token = per_token, .capacity = 1.2}, 4);
  }
  SECTION("an expert's rows are more than the products cut at once") {
    check_bits({.experts = 4, .per_token = 2, .tokens = 700, .capacity = 0.6, .favourites = 1}, 2);
  }
  SECTION("one token") { check_bits({.tokens = 1}, 4); }
  SECTION("three ranks") { check_bits({.experts = 9, .capacity = 0.5}, 3); }
}

TEST_CASE("the rows a rank receives per round are bounded by the stated capacity", "[moe][ranks]") {
  run_thread_ranks(4, [](Communicator& comm) {
    const auto most = [&](double capacity, int64_t experts) {
      return ExpertRanks(&comm, capacity).most_rows(100, 3, experts);
    };
    const bool ok =
        most(2, 8) == 600 && most(0.001, 8) == 100 && most(1e9, 8) == 800 && most(1.001, 16) == 301;
    if (!ok) throw std::runtime_error("most_rows");
    const Case c{.tokens = 100};
    const RankMoe moe(c, {&comm, 1.5});
    if (moe.saved.gate_up.dim(0) != 450 || moe.saved.received_x.dim(0) != 450)
      throw std::runtime_error("saved rows");
  });
}

TEST_CASE("an expert-parallel size that does not divide the experts is refused by name", "[moe][ranks]") {
  run_thread_ranks(3, [](Communicator& comm) {
    ParamStore store;
    const std::string message = test::message_of([&] { Moe(Case().model(), store, "mlp", 0, &comm); });
    if (message != "parallel.expert = 3 does not divide model.moe.num_experts = 8")
      throw std::runtime_error(message);
  });
  // Rank 1 has fewer tokens.
  CHECK_THROWS_WITH(run_thread_ranks(2,
                                     [](Communicator& comm) {
                                       set_num_threads(1);
                                       Case c;
                                       c.tokens -= comm.rank();
                                       RankMoe(c, &comm).run(0);
                                     }),
                    Catch::Contains("all ranks must have the same number"));
}

TEST_CASE("the balance loss uses the counts of all ranks of the global batch", "[moe][ranks]") {
  const test::OneThread one_thread;
  Case c{.tokens = 20, .dtype = DType::f64, .scope = BalanceScope::global_batch};
  Pool pool;
  const Tensor weight = pool.zeros(DType::f64, {1});
  Pool::set(weight, 0, 1.0 / static_cast<double>(2 * c.tokens));
  // Alone, with the counts of both as if the other rank had been computed before.
  std::array<std::unique_ptr<RankMoe>, 2> alone;
  std::array<std::vector<double>, 2> counted;
  for (int r = 0; r < 2; ++r) {
    RankMoe other(c);
    other.run(1 - r);
    alone[static_cast<size_t>(r)] = std::make_unique<RankMoe>(c);
    RankMoe& one = *alone[static_cast<size_t>(r)];
    for (int64_t e = 0; e < c.experts; ++e) Pool::set(one.totals, e, Pool::get(other.saved.counts, e));
    one.run(r, {.totals = one.totals, .token_weight = weight});
  }
  Findings findings;
  run_thread_ranks(2, [&](Communicator& comm) {
    set_num_threads(1);
    RankMoe mine(c, {&comm, 1});
    // The forward pass accumulates totals, so a second one would count again.
    mine.run(comm.rank(),
             {.totals = mine.totals, .token_weight = weight, .ranks = &comm, .counts = mine.counts});
    const RankMoe& one = *alone[static_cast<size_t>(comm.rank())];
    findings.same("counts", mine.counts.rows(0, 1), one.totals.view({one.totals.numel()}).rows(0, c.experts));
    findings.same("router", mine.store.grad(0), one.store.grad(0));
    findings.same("dx", mine.dx, one.dx);
  });
}

TEST_CASE("a transformer with expert parallelism keeps its bits under any recomputation",
          "[moe][ranks][recompute]") {
  const test::OneThread one_thread;
  ModelConfig c = test::tiny_config();
  c.num_hidden_layers = 3;
  c.moe.num_experts = 6;
  c.moe.num_experts_per_tok = 2;
  c.moe.moe_intermediate_size = 4;
  c.moe.mlp_only_layers = {1};
  const auto tokens = [](int rank) {
    test::TokenBatch b;
    b.add(test::random_tokens(13, 11, static_cast<uint32_t>(rank + 1)));
    return b;
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // Alone, one rank's batch after the other; replicated parameters separately.
    test::TestModel sum(c, tokens(0), dtype);
    std::vector<std::unique_ptr<test::TestModel>> alone;
    std::vector<double> losses;
    for (int r = 0; r < 2; ++r) {
      alone.push_back(std::make_unique<test::TestModel>(c, tokens(r), dtype));
      losses.push_back(alone.back()->loss_and_gradient());
      sum.batch = tokens(r);
      sum.add_gradient();
    }
    test::for_each_value<Recompute>([&](Recompute recompute) {
      INFO(dtype_name(dtype) << ", recompute " << static_cast<int>(recompute));
      Findings findings;
      run_thread_ranks(2, [&](Communicator& comm) {
        set_num_threads(1);
        test::TestModel m(c, tokens(comm.rank()), dtype, recompute, {&comm, 0.7});
        const double loss = m.loss_and_gradient();
        const std::string who = fmt::format("rank {}: ", comm.rank());
        const test::TestModel& one = *alone[static_cast<size_t>(comm.rank())];
        findings.check(loss == losses[static_cast<size_t>(comm.rank())], who + "loss");
        findings.same(who + "hidden", m.saved.hidden, one.saved.hidden);
        same_gradients(findings, who, m.store, one.store, false);
        same_gradients(findings, who, m.store, sum.store, true);
      });
    });
  }
}

TEST_CASE("gradients under expert parallelism equal central differences of all ranks' losses",
          "[moe][ranks][gradient]") {
  Findings findings;
  for (const bool keep_inner : {true, false})
    for (const double capacity : {2.0, 0.5})
      run_thread_ranks(2, [&](Communicator& comm) {
        set_num_threads(1);
        const Case c{.experts = 4,
                     .per_token = 2,
                     .tokens = 6,
                     .hidden = 6,
                     .width = 4,
                     .shared = 3,
                     .shared_gate = true,
                     .dtype = DType::f64,
                     .capacity = capacity,
                     .keep_inner = keep_inner};
        RankMoe m(c, {&comm, capacity});
        int64_t extra = 0;
        m.run(comm.rank(), {.extra_rounds = &extra});
        findings.check((extra > 0) == (capacity < 1), "rounds");
        const auto loss = [&] {
          m.store.pack(*m.context);
          m.moe().forward(*m.context, m.x, {}, m.saved);
          const int64_t T = c.tokens, E = c.experts;
          double sum = test::dot(m.dy, m.saved.y), z = 0;
          for (int64_t t = 0; t < T; ++t) z += std::pow(Pool::get(m.saved.lse, t), 2);
          sum += m.config().moe.router_z_loss_coefficient * z / static_cast<double>(T);
          for (int64_t e = 0; e < E; ++e) {
            double p = 0;
            for (int64_t t = 0; t < T; ++t) p += Pool::get(m.saved.probabilities, t * E + e);
            sum += m.config().moe.load_balance.coefficient * static_cast<double>(E) *
                   Pool::get(m.saved.counts, e) / static_cast<double>(T * c.per_token) * p /
                   static_cast<double>(T);
          }
          all_reduce(comm, &sum, 1);
          return sum;
        };
        Pool pool;
        // The ranks take turns; the others compute the loss equally often.
        const auto check = [&](int owner, const std::string& what, const Tensor& value,
                               const Tensor& gradient) {
          const bool mine = owner == comm.rank();
          const Tensor analytic = pool.copy(gradient, DType::f64);
          const double error =
              test::gradient_error(mine ? value : pool.copy(value, DType::f64), analytic, loss, 12, 1e-6);
          if (mine) findings.check(error <= 1e-7, fmt::format("{} of rank {}: {}", what, owner, error));
        };
        for (int owner = 0; owner < 2; ++owner) {
          check(owner, "x", m.x, m.dx);
          for (size_t i = 0; i < m.store.specs().size(); ++i)
            check(owner, m.store.specs()[i].name, m.store.value(static_cast<ParamStore::Id>(i)),
                  m.store.grad(static_cast<ParamStore::Id>(i)));
        }
      });
}

}  // namespace sluice
