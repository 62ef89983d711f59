#pragma once
// Conformance tests of communicators, executed by every rank, with threads and under mpirun.
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/reduce.h"

namespace sluice::test {

#define COMM_REQUIRE(condition) \
  if (!(condition))             \
  throw std::runtime_error(std::string("rank ") + std::to_string(c.rank()) + ": " #condition)

inline int32_t value(int from, int to, int64_t i) {
  return static_cast<int32_t>(1'000'000 * from + 10'000 * to + i);
}

inline void check_collectives(Communicator& c) {
  const int R = c.size(), me = c.rank();
  COMM_REQUIRE(me >= 0 && me < R);
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{5000}}) {
    const int64_t bytes = n * 4;
    for (int root = 0; root < R; ++root) {
      std::vector<int32_t> data(static_cast<size_t>(n), -1);
      if (me == root)
        for (int64_t i = 0; i < n; ++i) data[static_cast<size_t>(i)] = value(root, 0, i);
      c.broadcast(data.data(), bytes, root);
      for (int64_t i = 0; i < n; ++i) COMM_REQUIRE(data[static_cast<size_t>(i)] == value(root, 0, i));
    }
    std::vector<int32_t> all(static_cast<size_t>(R * n), -1), mine(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) mine[static_cast<size_t>(i)] = value(me, 1, i);
    const auto check_all = [&] {
      for (int r = 0; r < R; ++r)
        for (int64_t i = 0; i < n; ++i) COMM_REQUIRE(all[static_cast<size_t>(r * n + i)] == value(r, 1, i));
    };
    c.all_gather(all.data(), mine.data(), bytes);
    check_all();
    std::vector<int32_t> fresh(all.size(), -1);
    std::copy(mine.begin(), mine.end(), fresh.begin() + me * n);
    all = fresh;
    c.all_gather(all.data(), all.data() + me * n, bytes);  // in place
    check_all();

    std::vector<int32_t> sent(static_cast<size_t>(R * n)), received(sent.size(), -1);
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < n; ++i) sent[static_cast<size_t>(r * n + i)] = value(me, r, i);
    c.all_to_all(received.data(), sent.data(), bytes);
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < n; ++i)
        COMM_REQUIRE(received[static_cast<size_t>(r * n + i)] == value(r, me, i));
  }
}

/// Parts of every size, including zero: rank a sends 3 (a + 2 b) % 7 integers to b.
inline void check_uneven(Communicator& c) {
  const int R = c.size(), me = c.rank();
  const auto count = [](int from, int to) { return int64_t{3} * (from + 2 * to) % 7; };
  std::vector<int32_t> sent, received;
  std::vector<int64_t> sent_bytes, received_bytes;
  for (int r = 0; r < R; ++r) {
    for (int64_t i = 0; i < count(me, r); ++i) sent.push_back(value(me, r, i));
    sent_bytes.push_back(4 * count(me, r));
    received_bytes.push_back(4 * count(r, me));
    received.resize(received.size() + static_cast<size_t>(count(r, me)), -1);
  }
  c.all_to_all_v(received.data(), received_bytes.data(), sent.data(), sent_bytes.data());
  size_t at = 0;
  for (int r = 0; r < R; ++r)
    for (int64_t i = 0; i < count(r, me); ++i) COMM_REQUIRE(received[at++] == value(r, me, i));
}

inline void check_messages(Communicator& c) {
  const int R = c.size(), me = c.rank();
  if (R == 1) return;
  // A ring, in which the first rank avoids the deadlock.
  std::vector<int32_t> out(3000, me), in(3000, -1);
  const int next = (me + 1) % R, before = (me + R - 1) % R;
  const auto bytes = static_cast<int64_t>(out.size()) * 4;
  if (me == 0) c.send(out.data(), bytes, next);
  c.receive(in.data(), bytes, before);
  if (me != 0) c.send(out.data(), bytes, next);
  for (const int32_t x : in) COMM_REQUIRE(x == before);
  c.barrier();
}

inline void check_split(Communicator& c) {
  const int R = c.size(), me = c.rank();
  // Odd and even ranks in descending order; then each half is split again.
  const auto half = c.split(me % 2, -me);
  const int members = (R + 1 - me % 2) / 2;
  COMM_REQUIRE(half->size() == members);
  COMM_REQUIRE(half->rank() == members - 1 - me / 2);
  int64_t sum = me;
  all_reduce(*half, &sum, 1);
  int64_t expected = 0;
  for (int r = me % 2; r < R; r += 2) expected += r;
  COMM_REQUIRE(sum == expected);
  const auto alone = half->split(half->rank(), 0);
  COMM_REQUIRE(alone->size() == 1 && alone->rank() == 0);
  alone->barrier();
  const auto again = c.split(0, 0);
  COMM_REQUIRE(again->size() == R && again->rank() == me);
  check_collectives(*again);
}

/// The sum equals the documented tree bit for bit, on every rank, as a whole and in parts.
inline void check_sums(Communicator& c) {
  const int R = c.size(), me = c.rank();
  const int64_t n = 4099;
  const auto row = [n, R](int rank) {
    std::mt19937 random(static_cast<uint32_t>(rank) + 7);
    std::normal_distribution<float> normal(0, 1e4f);
    std::vector<float> x(static_cast<size_t>(R * n));
    for (float& v : x) v = normal(random);
    return x;
  };
  std::vector<std::vector<float>> rows;
  for (int r = 0; r < R; ++r) rows.push_back(row(r));
  const auto tree = [&](auto&& self, int first, int count, size_t i) -> float {
    if (count == 1) return rows[static_cast<size_t>(first)][i];
    int half = 1;
    while (2 * half < count) half *= 2;
    return self(self, first, half, i) + self(self, first + half, count - half, i);
  };
  std::vector<float> mine(static_cast<size_t>(n)), work(static_cast<size_t>(R * n));
  c.all_to_all(work.data(), rows[static_cast<size_t>(me)].data(), n * static_cast<int64_t>(sizeof(float)));
  sum_parts(mine.data(), work.data(), R, n);
  for (int64_t i = 0; i < n; ++i)
    COMM_REQUIRE(mine[static_cast<size_t>(i)] == tree(tree, 0, R, static_cast<size_t>(me * n + i)));
  std::vector<float> all = rows[static_cast<size_t>(me)];
  all_reduce(c, all.data(), n);
  for (int64_t i = 0; i < n; ++i)
    COMM_REQUIRE(all[static_cast<size_t>(i)] == tree(tree, 0, R, static_cast<size_t>(i)));
}

inline void check_communicator(Communicator& c) {
  check_collectives(c);
  check_uneven(c);
  check_messages(c);
  check_split(c);
  check_sums(c);
  COMM_REQUIRE(c.progress().operation.load() == nullptr && c.progress().sequence > 0);
}

#undef COMM_REQUIRE

}  // namespace sluice::test
