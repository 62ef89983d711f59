// bits.log: hashes that do not depend on the sharding, and the comparison of two runs.
#include "checkpoint/state_hash.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "comm/threads.h"
#include "core/io.h"
#include "data/temporary.h"

using namespace sluice;
using Catch::Contains;
using test::TemporaryFolder;

namespace {

constexpr int64_t kElements = 12;

/// Two tensors; `ranks` > 1: each holds a slice of the first, and the second as a whole.
CheckpointContent slice(std::vector<float>& a, std::vector<double>& b, int rank, int ranks) {
  const int64_t n = kElements / ranks;
  CheckpointContent c;
  c.weights = {{"a", Tensor(a.data() + rank * n, DType::f32, {n}), {3, 4}, rank * n}};
  c.optimizer = {{"b", Tensor(b.data(), DType::f64, {3})}};
  return c;
}

uint64_t hash(std::vector<float> a, const std::vector<double>& b, int ranks) {
  uint64_t result = 0;
  run_thread_ranks(ranks, [&](Communicator& comm) {
    std::vector<double> mine = b;
    Context ctx(0);
    const uint64_t h = state_hash(ctx, slice(a, mine, comm.rank(), ranks), comm);
    if (comm.rank() == 0) result = h;
  });
  return result;
}

}  // namespace

TEST_CASE("the state hash depends on the bits, not on the layout", "[bits]") {
  std::vector<float> a(kElements);
  for (size_t i = 0; i < a.size(); ++i) a[i] = 0.5f * static_cast<float>(i);
  const std::vector<double> b = {1, 2, 3};
  const uint64_t one = hash(a, b, 1);
  for (const int ranks : {2, 3, 4}) CHECK(hash(a, b, ranks) == one);
  std::vector<float> other = a;
  other[0] = -0.0f;  // a bit, not a value
  CHECK(hash(other, b, 2) != one);
  other = a;
  std::swap(other[3], other[7]);
  CHECK(hash(other, b, 2) != one);
  CHECK(hash(a, {1, 2, std::nextafter(3.0, 4)}, 2) != one);
}

TEST_CASE("differing replicas of a tensor are detected", "[bits]") {
  std::vector<float> a(kElements, 1.0f);
  std::string what;
  run_thread_ranks(2, [&](Communicator& comm) {
    std::vector<double> b = {1, 2, comm.rank() == 1 ? 3.5 : 3};
    Context ctx(0);
    try {
      state_hash(ctx, slice(a, b, comm.rank(), 2), comm);
    } catch (const Error& error) {
      what = error.what();
    }
  });
  CHECK(what == "ranks hold different bits of b (elements 0 to 2)");
}

TEST_CASE("the first differing step and its difference are reported", "[bits]") {
  const TemporaryFolder folder;
  const auto write = [&](const char* name, int64_t steps, int64_t odd, double loss, const char* state,
                         int64_t without) {
    std::string text;
    for (int64_t s = 1; s <= steps; ++s) {
      nlohmann::ordered_json line = bits_line(s, s == odd ? loss : 1.0, 2.0);
      if (s % 2 == 0) line["state"] = s == odd ? state : "00";
      if (s != without) text += line.dump() + "\n";
    }
    test::write_bytes(folder / name, text);
    return folder / name;
  };
  const std::string a = write("a", 6, 0, 0, "", 0);
  const BitsComparison same = compare_bits(a, write("b", 6, 0, 0, "", 0));
  CHECK(same.step == -1);
  CHECK(same.steps == 6);
  CHECK(same.states == 3);
  const BitsComparison shorter = compare_bits(a, write("b", 4, 0, 0, "", 0));
  CHECK(shorter.step == -1);
  CHECK(shorter.last_b == 4);
  const BitsComparison loss = compare_bits(a, write("b", 6, 3, std::nextafter(1.0, 2), "", 0));
  CHECK(loss.step == 3);
  CHECK_THAT(loss.difference, Contains("loss 1 and 1 (3ff0000000000000 and 3ff0000000000001)"));
  const BitsComparison state = compare_bits(a, write("b", 6, 4, 1.0, "01", 0));
  CHECK(state.step == 4);
  CHECK_THAT(state.difference, Contains("weights and moments"));
  const BitsComparison gap = compare_bits(a, write("b", 6, 0, 0, "", 2));
  CHECK(gap.step == 2);
  CHECK_THAT(gap.difference, Contains("missing from") && Contains("/b"));
  test::write_bytes(folder / "b", "no\nbits\n");
  CHECK_THROWS_WITH(compare_bits(a, folder / "b"), Contains("not a bits.log"));
}

TEST_CASE("lines of a bits.log whose values are not text are passed over like damaged ones", "[bits]") {
  const test::TemporaryFolder folder;
  const std::string sound = bits_line(1, 1.0, 2.0).dump() + "\n";
  test::write_bytes(folder / "a", sound);
  for (const char* line : {R"({"step":2,"loss":1.5,"grad_norm":"4000000000000000"})",
                           R"({"step":2,"loss":"4000000000000000","grad_norm":null})",
                           R"({"step":2,"loss":"40","grad_norm":"40","state":["01"]})"}) {
    test::write_bytes(folder / "b", sound + line + "\n");
    const BitsComparison c = compare_bits(folder / "a", folder / "b");
    CHECK(c.step == -1);
    CHECK(c.last_b == 1);
    test::write_bytes(folder / "b", std::string(line) + "\n");
    CHECK_THROWS_WITH(compare_bits(folder / "a", folder / "b"), Contains("not a bits.log"));
  }
}
