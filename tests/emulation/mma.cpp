// Matrices of a warp: ldmatrix, stmatrix, mma.sync m16n8k16. Lanes copy their registers to arrays of the
// warp, the last one computes, and each copies its results back: one set of arrays in cache instead of 32
// stacks. Fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16". With group g = lane / 4 and t = lane % 4:
//   A register i:     row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next
//   B register i:     rows 2 t + 8 i and the next, column g
//   C, D register i:  row g + 8 (i / 2), column 2 t + i % 2
#include <algorithm>

#include "machine.h"

namespace emu {
namespace {

float low_bf16(uint32_t pair) { return from_bits<float>(static_cast<uint64_t>(pair << 16)); }
float high_bf16(uint32_t pair) { return from_bits<float>(static_cast<uint64_t>(pair & 0xffff0000u)); }

/// Eight rows of 16 bytes at a time; rows whose chunk falls into the same banks wait for each other.
void count_conflicts(Thread* threads, int matrices) {
  const Warp& w = warp_of(threads[0]);
  Stats& stats = threads[0].group->stats;
  for (int m = 0; m < matrices; ++m) {
    int worst = 1;
    for (int i = 0; i < 8; ++i) {
      int same_banks = 1;
      for (int j = 0; j < i; ++j) {
        const uint32_t a = w.row_address[8 * m + i], b = w.row_address[8 * m + j];
        same_banks += a != b && a % 128 / 16 == b % 128 / 16;
      }
      worst = std::max(worst, same_banks);
    }
    ++stats.ldsm_phases;
    stats.ldsm_conflicts += static_cast<uint64_t>(worst - 1);
  }
}

template <bool kTransposed>
void load_matrices(Thread* threads, uint32_t, int matrices) {
  Warp& w = warp_of(threads[0]);
  count_conflicts(threads, matrices);
  for (int m = 0; m < matrices; ++m) {
    const uint16_t(*rows)[8] = w.row + 8 * m;
    for (unsigned l = 0; l < kWarpSize; ++l) {
      const unsigned g = l / 4, t = l % 4 * 2;
      const uint32_t low = kTransposed ? rows[t][g] : rows[g][t],
                     high = kTransposed ? rows[t + 1][g] : rows[g][t + 1];
      w.fragment[l][m] = low | high << 16;
    }
  }
}

template <bool kTransposed>
void store_matrices(Thread* threads, uint32_t, int matrices) {
  Warp& w = warp_of(threads[0]);
  count_conflicts(threads, matrices);
  for (int m = 0; m < matrices; ++m) {
    uint16_t(*rows)[8] = w.row + 8 * m;
    for (unsigned l = 0; l < kWarpSize; ++l) {
      const unsigned g = l / 4, t = l % 4 * 2;
      const uint16_t low = static_cast<uint16_t>(w.fragment[l][m]),
                     high = static_cast<uint16_t>(w.fragment[l][m] >> 16);
      (kTransposed ? rows[t][g] : rows[g][t]) = low;
      (kTransposed ? rows[t + 1][g] : rows[g][t + 1]) = high;
    }
  }
}

void multiply(Thread* threads, uint32_t lanes, int) {
  Warp& w = warp_of(threads[0]);
  if (lanes != kAllLanes) fail("mma.sync: lanes of the warp have exited");
  for (int row = 0; row < 16; ++row) {
    float sum[8];
    for (int n = 0; n < 8; ++n) sum[n] = w.c[row][n];
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) sum[n] += w.a[row][k] * w.b[k][n];
    for (int n = 0; n < 8; ++n) w.d[row][n] = sum[n];
  }
  ++threads[0].group->stats.mma;
}

const Collective kLoad[] = {{"ldmatrix", load_matrices<false>}, {"ldmatrix.trans", load_matrices<true>}};
const Collective kStore[] = {{"stmatrix", store_matrices<false>}, {"stmatrix.trans", store_matrices<true>}};
const Collective kMultiply = {"mma.sync", multiply};

bool supplies_row(const Thread& t, int matrices) { return static_cast<int>(t.lane) < 8 * matrices; }

char* row_at(Thread& t, uint32_t address, const char* what, Site site) {
  if (address % 16) fail_at(site, "%s: row address %u is not 16-byte aligned", what, address);
  warp_of(t).row_address[t.lane] = address;
  return shared_range(address, 16, what, site);
}

}  // namespace

void ldmatrix(uint32_t* registers, uint32_t address, int matrices, bool transposed, Site site) {
  Thread& t = self();
  Warp& w = warp_of(t);
  if (supplies_row(t, matrices)) {
    const char* row = row_at(t, address, "ldmatrix", site);
    san::reads(row, 16);
    san::copy(w.row[t.lane], row, 16);
  }
  meet(kAllLanes, kLoad[transposed], matrices, site);
  for (int m = 0; m < matrices; ++m) registers[m] = w.fragment[t.lane][m];
}

void stmatrix(const uint32_t* registers, uint32_t address, int matrices, bool transposed, Site site) {
  Thread& t = self();
  Warp& w = warp_of(t);
  for (int m = 0; m < matrices; ++m) w.fragment[t.lane][m] = registers[m];
  char* row = supplies_row(t, matrices) ? row_at(t, address, "stmatrix", site) : nullptr;
  meet(kAllLanes, kStore[transposed], matrices, site);
  if (!row) return;
  san::writes(row, 16);
  san::copy(row, w.row[t.lane], 16);
}

void mma_16816_bf16(float* d, const uint32_t* a, const uint32_t* b, const float* c, Site site) {
  Thread& t = self();
  Warp& w = warp_of(t);
  const unsigned g = t.lane / 4, pair = t.lane % 4 * 2;
  for (unsigned i = 0; i < 4; ++i) {
    float* to = &w.a[g + 8 * (i % 2)][pair + 8 * (i / 2)];
    to[0] = low_bf16(a[i]), to[1] = high_bf16(a[i]);
  }
  for (unsigned i = 0; i < 2; ++i) {
    w.b[pair + 8 * i][g] = low_bf16(b[i]);
    w.b[pair + 8 * i + 1][g] = high_bf16(b[i]);
  }
  for (unsigned i = 0; i < 4; ++i) w.c[g + 8 * (i / 2)][pair + i % 2] = c[i];
  meet(kAllLanes, kMultiply, 0, site);
  for (unsigned i = 0; i < 4; ++i) d[i] = w.d[g + 8 * (i / 2)][pair + i % 2];
}

}  // namespace emu
