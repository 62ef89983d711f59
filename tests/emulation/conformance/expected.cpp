// The output of each micro-test according to the PTX ISA 9.0, computed by plain loops over whole matrices,
// without lane-by-lane emulation and without code of the emulator.
#include <bit>
#include <cmath>
#include <cstring>

#include "conformance.h"

namespace sluice::conformance {
namespace {

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
/// Round to nearest even.
uint32_t bf16(float x) { return (bits(x) + 0x7fff + (bits(x) >> 16 & 1)) >> 16; }
uint32_t pair(uint32_t low, uint32_t high) { return low | high << 16; }

// "Each thread t of the warp holds row t / 4, elements 2 (t % 4) and the next, of each 8 x 8 matrix"; with
// .trans of its transpose. Our matrices: 0 and 1 are rows 0-7 and 8-15 of columns 0-7, 2 and 3 of columns
// 8-15.
Dump load_matrices(const char* name, int matrices, bool transposed) {
  Dump dump{name, {}};
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < matrices; ++m) {
      uint32_t element[2];
      for (int e = 0; e < 2; ++e) {
        int row = lane / 4, column = 2 * (lane % 4) + e;
        if (transposed) std::swap(row, column);
        element[e] = moved((8 * (m % 2) + row) * 16 + 8 * (m / 2) + column);
      }
      dump.words.push_back(pair(element[0], element[1]));
    }
  return dump;
}

Dump store_matrices(const char* name, bool transposed) {
  std::vector<uint16_t> tile(256);
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m)
      for (int e = 0; e < 2; ++e) {
        int row = lane / 4, column = 2 * (lane % 4) + e;
        if (transposed) std::swap(row, column);
        tile[static_cast<size_t>((8 * (m % 2) + row) * 16 + 8 * (m / 2) + column)] =
            static_cast<uint16_t>(8 * lane + 2 * m + e);
      }
  Dump dump{name, {}};
  for (size_t i = 0; i < 128; ++i) dump.words.push_back(pair(tile[2 * i], tile[2 * i + 1]));
  return dump;
}

Dump multiply() {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8;
         ++i)  // a0..a7: rows g for i in {0, 1, 4, 5}, columns 2 t + (i & 1), 8 more from a4 on
      a[g + (i / 2 % 2 ? 8 : 0)][2 * t + i % 2 + (i >= 4 ? 8 : 0)] = static_cast<float>(factor(8 * lane + i));
    for (int i = 0; i < 4; ++i)  // b0..b3: rows 2 t + (i & 1), 8 more from b2 on; column g
      b[2 * t + i % 2 + (i >= 2 ? 8 : 0)][g] = static_cast<float>(other_factor(4 * lane + i));
    for (int i = 0; i < 4; ++i)  // c0..c3: row g, from c2 on g + 8; columns 2 t + (i & 1)
      c[g + (i >= 2 ? 8 : 0)][2 * t + i % 2] = static_cast<float>(4 * lane + i);
  }
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j)
      for (int k = 0; k < 16; ++k) c[i][j] += a[i][k] * b[k][j];
  Dump dump{"mma_16816", {}};
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      dump.words.push_back(bits(c[lane / 4 + (i >= 2 ? 8 : 0)][2 * (lane % 4) + i % 2]));
  return dump;
}

Dump pack() {
  Dump dump{"pack_bf16", {}};
  for (int i = 0; i < 32; ++i)
    dump.words.push_back(pair(bf16(1.0f + static_cast<float>(i) / 256.0f), bf16(-static_cast<float>(i))));
  return dump;
}

Dump copy_async() {
  Dump dump{"cp_async_16", {}};
  for (int thread = 0; thread < 32; ++thread)
    for (int i = 0; i < 8; ++i) {
      const int word = thread * 8 + i;
      const bool zero = i < 4 && thread % 2 == 1;
      dump.words.push_back(zero ? 0 : pair(moved(2 * word), moved(2 * word + 1)));
    }
  return dump;
}

Dump sequence(const char* name, int n, uint32_t first, uint32_t multiplier, uint32_t step) {
  Dump dump{name, {}};
  for (int i = 0; i < n; ++i, first = first * multiplier + step) dump.words.push_back(first);
  return dump;
}

Dump elected() {
  Dump dump{"elect_one, setmaxnreg", std::vector<uint32_t>(256, 1)};
  for (uint32_t thread = 256; thread < 512; ++thread) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 160; ++i) sum = 3 * sum + (i * i ^ thread);
    dump.words.push_back(sum);
  }
  return dump;
}

Dump phases() {
  Dump dump{"mbarrier", {}};
  uint32_t turn = 7;
  for (uint32_t phase = 0; phase < 4; ++phase) {
    turn = turn * 3 + phase;
    dump.words.insert(dump.words.end(), 128, turn);
  }
  return dump;
}

Dump exponents(const char* name, bool log) {
  Dump dump{name, {}, true};
  for (int i = 0; i < 128; ++i)
    dump.words.push_back(
        bits(static_cast<float>(log ? std::log2(double{static_cast<float>(i + 3) * 0.37f})
                                    : std::exp2(double{static_cast<float>(i - 64) * 0.31f}))));
  return dump;
}

// ---- TMA. With the 128-byte swizzle, 16-byte vector v of row r of a 128-byte wide box lies at vector v ^ (r
// % 8); a row of 64 bytes is half such a line.

/// Offset, in elements, of element (row, column) of a box with rows of `columns` elements of so many bytes.
int in_box(int row, int column, int columns, int bytes) {
  const int byte = (row * columns + column) * bytes, line = byte / 128, vector = byte % 128 / 16;
  return (line * 128 + ((vector ^ (line % 8)) * 16) + byte % 16) / bytes;
}

struct Box {
  int planes, rows, columns;
  int z, y, x;  // of its first element in the tensor
  int tensor_planes, tensor_rows, tensor_columns;
  int bytes = 2;  // of an element
  /// f(place in the box, place in the tensor or -1 outside)
  template <class F>
  void for_each(F&& f) const {
    for (int p = 0; p < planes; ++p)
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c) {
          const int tp = z + p, tr = y + r, tc = x + c;
          const bool inside =
              tp >= 0 && tp < tensor_planes && tr >= 0 && tr < tensor_rows && tc >= 0 && tc < tensor_columns;
          f(in_box(p * rows + r, c, columns, bytes),
            inside ? (tp * tensor_rows + tr) * tensor_columns + tc : -1);
        }
  }
};
constexpr Box kMatrixBox = {1, kBoxRows, kBoxColumns, 0, kBoxY, kBoxX, 1, kTensorRows, kTensorColumns};
constexpr Box kPlanesBox = {2, kBoxPlaneRows, kBoxPlaneColumns, 2, 8, 24, kPlanes, kPlaneRows, kPlaneColumns};

std::vector<uint32_t> words_of(const std::vector<uint16_t>& elements) {
  std::vector<uint32_t> words(elements.size() / 2);
  for (size_t i = 0; i < words.size(); ++i) words[i] = pair(elements[2 * i], elements[2 * i + 1]);
  return words;
}

Dump load_box(const char* name, const Box& box) {
  std::vector<uint16_t> smem(static_cast<size_t>(box.planes * box.rows * box.columns));
  box.for_each(
      [&](int at, int from) { smem[static_cast<size_t>(at)] = from < 0 ? uint16_t{0} : moved(from); });
  return {name, words_of(smem)};
}

Dump store_box(const char* name, const Box& box) {
  std::vector<uint16_t> tensor(static_cast<size_t>(box.tensor_planes * box.tensor_rows * box.tensor_columns),
                               0xffff);
  box.for_each([&](int at, int to) {
    if (to >= 0) tensor[static_cast<size_t>(to)] = moved(at);
  });
  return {name, words_of(tensor)};
}

/// Both blocks have both boxes; the second one begins at column 0.
Dump load_both(const char* name, Box box) {
  std::vector<uint32_t> words = load_box(name, box).words;
  box.x = 0;
  const std::vector<uint32_t> second = load_box(name, box).words;
  words.insert(words.end(), second.begin(), second.end());
  Dump dump{name, words};
  dump.words.insert(dump.words.end(), words.begin(), words.end());
  return dump;
}

Dump sent() {
  Dump dump{"store_async, mbarrier_arrive_cluster", {}};
  for (uint32_t rank = 0; rank < 2; ++rank)
    for (uint32_t turn = 0; turn < 4; ++turn)
      dump.words.insert(dump.words.end(), 64, 100 * (rank ^ 1) + turn);
  return dump;
}

/// A box of f32: element i of shared memory is stored as i, then i, 2 i, 3 i and 4 i are added.
Dump add_box() {
  Box box = kPlanesBox;
  box.bytes = 4;
  Dump dump{"tma_add_3d", std::vector<uint32_t>(kPlanes * kPlaneRows * kPlaneColumns, 0xffffffffu)};
  box.for_each([&](int at, int to) {
    if (to >= 0) dump.words[static_cast<size_t>(to)] = bits(static_cast<float>(at * (1 + 1 + 2 + 3 + 4)));
  });
  return dump;
}

Dump bulk() {
  Dump dump{"bulk_reduce_add, bulk_store", {}};
  for (int i = 0; i < 128; ++i) dump.words.push_back(bits(static_cast<float>(i * (1 + 2 + 3 + 4))));
  for (int i = 0; i < 128; ++i) dump.words.push_back(bits(static_cast<float>(i)));
  return dump;
}

// Block b of a cluster gets, from each of the cluster's four in order, its number in the grid and b.
Dump exchange() {
  Dump dump{"cluster_sync, store_to_block", {}};
  for (int block = 0; block < 8; ++block)
    for (int from = 0; from < 4; ++from)
      for (const int value : {block / 4 * 4 + from, block % 4})
        dump.words.push_back(bits(static_cast<float>(value)));
  return dump;
}

// ---- wgmma: "d[4 i + 2 r + e] of a thread is row 16 warp + lane / 4 + 8 r, column 8 i + 2 (lane % 4) + e"

void add_products(std::vector<Dump>& dumps, int n) {
  Dump dump;
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < n / 2; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2),
                column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      int sum = 0;
      for (int k = 0; k < kProductDepth; ++k)
        sum += factor(row * kProductDepth + k) * other_factor(column * kProductDepth + k);
      dump.words.push_back(bits(static_cast<float>(sum)));
    }
  for (const char* form : {"ss N=%d A=k B=k", "ss N=%d A=k B=mn", "ss N=%d A=mn B=k", "ss N=%d A=mn B=mn",
                           "rs N=%d A=registers B=k", "rs N=%d A=registers B=mn"}) {
    const std::string text = form;
    const size_t at = text.find("%d");
    dump.name = "wgmma_" + text.substr(0, at) + std::to_string(n) + text.substr(at + 2);
    dumps.push_back(dump);
  }
}

}  // namespace

std::vector<Dump> expected() {
  std::vector<Dump> dumps = {load_matrices("ldmatrix_x4", 4, false),
                             load_matrices("ldmatrix_x4_trans", 4, true),
                             load_matrices("ldmatrix_x2", 2, false),
                             load_matrices("ldmatrix_x2_trans", 2, true),
                             multiply(),
                             pack(),
                             copy_async(),
                             sequence("named_barrier", 64, 0, 1, 3),
                             sequence("load_acquire, store_release, spin_until", 8, 1, 3, 0),
                             exponents("ex2", false),
                             exponents("lg2", true),
                             store_matrices("stmatrix_x4", false),
                             store_matrices("stmatrix_x4_trans", true),
                             phases(),
                             load_box("tma_load_2d", kMatrixBox),
                             load_box("tma_load_3d", kPlanesBox),
                             store_box("tma_store_2d", kMatrixBox),
                             store_box("tma_store_3d", kPlanesBox),
                             add_box(),
                             load_both("tma_load_2d_multicast", kMatrixBox),
                             load_both("tma_load_3d_multicast", kPlanesBox),
                             sent(),
                             bulk(),
                             exchange(),
                             elected()};
  for (const int n : {32, 64, 128, 192, 256}) add_products(dumps, n);
  return dumps;
}

uint64_t hash(const std::vector<uint32_t>& words) {
  uint64_t h = 0xcbf29ce484222325ull;  // FNV-1a
  for (const uint32_t word : words)
    for (int byte = 0; byte < 4; ++byte) h = (h ^ (word >> (8 * byte) & 0xff)) * 0x100000001b3ull;
  return h;
}

bool agree(const Dump& a, const Dump& b) {
  if (a.name != b.name || a.words.size() != b.words.size()) return false;
  if (!a.approximate) return a.words == b.words;
  for (size_t i = 0; i < a.words.size(); ++i) {
    const double x = std::bit_cast<float>(a.words[i]), y = std::bit_cast<float>(b.words[i]);
    if (!(std::abs(x - y) <= 1e-6 * std::max(std::abs(y), 1.0)))
      return false;  // lg2 has an absolute error near 1
  }
  return true;
}

}  // namespace sluice::conformance
