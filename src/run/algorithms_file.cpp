#include "run/algorithms_file.h"

#include <spdlog/fmt/fmt.h>

#include <charconv>

#include "checkpoint/manifest.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

constexpr int kSchema = 1;

/// Calls f(name, member) for every member of a product but its types.
template <class Product, class F>
void for_each_member(Product& p, F&& f) {
  f("m", p.m), f("n", p.n), f("k", p.k);
  f("a_transposed", p.a_transposed), f("b_transposed", p.b_transposed), f("accumulate", p.accumulate);
  f("a_stride", p.a_stride), f("b_stride", p.b_stride), f("c_stride", p.c_stride);
}

DType read_dtype(const std::string& name, const std::string& path) {
  for (const DType t : {DType::f32, DType::bf16})
    if (name == dtype_name(t)) return t;
  fail(ExitCode::data, "{}: products of {} are not known", path, printable(name));
}

std::string hex(const ProductAlgorithm& algorithm) {
  std::string text;
  for (const uint64_t word : algorithm.words) text += fmt::format("{:016x}", word);
  return text;
}

void read_hex(ProductAlgorithm& algorithm, const std::string& text, const std::string& path) {
  const auto refuse = [&] { fail(ExitCode::data, "{}: '{}' is not an algorithm", path, printable(text)); };
  if (text.size() != 16 * algorithm.words.size()) refuse();
  for (size_t i = 0; i < algorithm.words.size(); ++i) {
    const char *begin = text.data() + 16 * i, *end = begin + 16;
    if (const auto [stop, error] = std::from_chars(begin, end, algorithm.words[i], 16);
        error != std::errc() || stop != end)
      refuse();
  }
}

nlohmann::ordered_json card_json(const CardAlgorithms& of) {
  nlohmann::ordered_json json = {{"card", of.card.name},
                                 {"compute_capability", of.card.compute_capability},
                                 {"multiprocessors", of.card.multiprocessors},
                                 {"cublaslt", of.card.library},
                                 {"products", nlohmann::ordered_json::array()}};
  for (const auto& [product, algorithm] : of.algorithms.by_product) {
    nlohmann::ordered_json row = product_json(product);
    row["us"] = algorithm.us;
    row["heuristic_us"] = algorithm.heuristic_us;
    row["bits_repeat"] = algorithm.bits_repeat;
    row["algorithm"] = hex(algorithm);
    json["products"].push_back(std::move(row));
  }
  return json;
}

CardAlgorithms read_card(const nlohmann::json& json, const std::string& path) {
  CardAlgorithms out;
  json.at("card").get_to(out.card.name);
  json.at("compute_capability").get_to(out.card.compute_capability);
  json.at("multiprocessors").get_to(out.card.multiprocessors);
  json.at("cublaslt").get_to(out.card.library);
  for (const nlohmann::json& row : json.at("products")) {
    ProductAlgorithm& algorithm = out.algorithms.by_product[read_product(row, path)];
    row.at("us").get_to(algorithm.us);
    row.at("heuristic_us").get_to(algorithm.heuristic_us);
    row.at("bits_repeat").get_to(algorithm.bits_repeat);
    read_hex(algorithm, row.at("algorithm").get<std::string>(), path);
  }
  return out;
}

}  // namespace

nlohmann::ordered_json product_json(const GpuProduct& product) {
  nlohmann::ordered_json json = {{"in", dtype_name(product.in)}, {"out", dtype_name(product.out)}};
  for_each_member(product, [&](const char* name, const auto& member) { json[name] = member; });
  return json;
}

GpuProduct read_product(const nlohmann::json& json, const std::string& path) {
  GpuProduct product;
  try {
    product.in = read_dtype(json.at("in").get<std::string>(), path);
    product.out = read_dtype(json.at("out").get<std::string>(), path);
    for_each_member(product, [&](const char* name, auto& member) { json.at(name).get_to(member); });
  } catch (const nlohmann::json::exception& error) {
    fail(ExitCode::data, "{}: {}", path, printable(error.what(), 300));
  }
  return product;
}

std::string algorithms_text(const std::vector<CardAlgorithms>& cards) {
  auto list = nlohmann::ordered_json::array();
  for (const CardAlgorithms& card : cards) list.push_back(card_json(card));
  const std::string sum = checksum(list.dump());
  return nlohmann::ordered_json{{"schema", kSchema}, {"checksum", sum}, {"cards", list}}.dump(1) + "\n";
}

std::vector<CardAlgorithms> read_algorithms(const std::string& text, const std::string& path) {
  const nlohmann::json json = parse_strict_json(text, path);
  std::vector<CardAlgorithms> cards;
  std::string sum;
  try {
    if (const int schema = json.at("schema").get<int>(); schema != kSchema)
      fail(ExitCode::data, "{}: schema {}, of which this version knows nothing", path, schema);
    for (const nlohmann::json& card : json.at("cards")) cards.push_back(read_card(card, path));
    json.at("checksum").get_to(sum);
  } catch (const nlohmann::json::exception& error) {
    fail(ExitCode::data, "{}: {}", path, printable(error.what(), 300));
  }
  // The words of an algorithm mean nothing to anyone but the library, which trusts them.
  if (algorithms_text(cards) != text)
    fail(ExitCode::data, "{}: its checksum is not {}", path, printable(sum));
  return cards;
}

}  // namespace sluice
