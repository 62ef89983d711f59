#include "run/timed_products.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "comm/collective_errors.h"
#include "core/io.h"
#include "core/steady_clock.h"
#include "run/algorithms_file.h"

namespace sluice {
namespace {

/// Of all ranks, on every rank: with Muon and ZeRO, or experts, ranks may have different ones.
std::set<GpuProduct> products_of_all(const std::set<GpuProduct>& mine, Communicator& ranks) {
  if (ranks.size() == 1) return mine;
  std::set<GpuProduct> all;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    auto list = nlohmann::ordered_json::array();
    for (const GpuProduct& product : mine) list.push_back(product_json(product));
    std::string text = list.dump();
    broadcast_text(ranks, text, rank);
    for (const nlohmann::json& product : nlohmann::json::parse(text))
      all.insert(read_product(product, "products"));
  }
  return all;
}

/// What the file holds; nothing, with a warning, where it cannot be used.
std::vector<CardAlgorithms> kept(const std::string& path, const ProductCard& card) {
  if (!io::exists(path)) return {};
  try {
    std::vector<CardAlgorithms> cards = read_algorithms(io::read_file(path, int64_t{64} << 20), path);
    if (std::none_of(cards.begin(), cards.end(), [&](const CardAlgorithms& c) { return c.card == card; }) &&
        !cards.empty())
      spdlog::warn(
          "{} has algorithms for {}, but not for {}: matrix products are timed anew, and losses may differ "
          "in their last bits",
          path, cards.back().card.text(), card.text());
    return cards;
  } catch (const Error& error) {
    spdlog::warn("{}: matrix products are timed anew, and losses may differ in their last bits",
                 error.what());
    return {};
  }
}

/// What rank 0 does.
TimedProducts look_up_or_time(const RunFolder& folder, const std::set<GpuProduct>& products,
                              bool deterministic) {
  constexpr int64_t kLittle = 64;  // bytes of scratch memory: nothing is computed here
  Context ctx(kLittle, Device::cuda);
  const ProductCard card = product_card(ctx);
  std::vector<CardAlgorithms> cards = kept(folder.file(kAlgorithmsFile), card);
  auto of_card =
      std::find_if(cards.begin(), cards.end(), [&](const CardAlgorithms& c) { return c.card == card; });
  if (of_card == cards.end()) of_card = cards.insert(cards.end(), {card, {}});

  TimedProducts out;
  std::set<GpuProduct> missing;
  for (const GpuProduct& product : products) {
    const ProductAlgorithm* known = of_card->algorithms.find(product);
    if (known && (known->bits_repeat || !deterministic) && computes(ctx, *known, product))
      out.algorithms.by_product[product] = *known;
    else
      missing.insert(product);
  }
  const double begun = steady_seconds();
  int64_t faster = 0;
  for (const auto& [product, algorithm] : time_products(missing, deterministic).by_product) {
    out.algorithms.by_product[product] = of_card->algorithms.by_product[product] = algorithm;
    if (algorithm.us < algorithm.heuristic_us) ++faster;
  }
  if (missing.empty()) {
    out.text = fmt::format("{} products as in {}", products.size(), folder.file(kAlgorithmsFile));
    return out;
  }
  folder.write(kAlgorithmsFile, algorithms_text(cards));
  out.text = fmt::format("{} of {} products timed in {:.1f} s, {} of them faster than by the heuristic",
                         missing.size(), products.size(), steady_seconds() - begun, faster);
  return out;
}

}  // namespace

TimedProducts choose_algorithms(const RunFolder* folder, const Config& config,
                                const std::set<GpuProduct>& products, Communicator& ranks) {
  // Bits that any number of ranks repeats cannot depend on what one of the runs has timed.
  const bool exact = config.parallel.determinism == Determinism::exact;
  if (exact || config.train.matmul_algorithm == MatmulAlgorithm::heuristic) return {};
  const std::set<GpuProduct> all = products_of_all(products, ranks);
  if (all.empty()) return {};
  TimedProducts out;
  auto code = ExitCode::ok;
  std::string text;
  if (ranks.rank() == 0) {
    try {
      out = look_up_or_time(*folder, all, config.train.deterministic);
      text = algorithms_text({{{}, out.algorithms}});
    } catch (const Error& error) {
      code = error.code();
      text = error.what();
    }
  }
  ranks.broadcast(&code, sizeof code, 0);
  broadcast_text(ranks, text, 0);
  if (code != ExitCode::ok) throw SharedError(code, text);
  if (ranks.rank() != 0) out.algorithms = read_algorithms(text, "algorithms of rank 0").at(0).algorithms;
  return out;
}

}  // namespace sluice
