#pragma once
// One micro-test per wrapper in cuda/common/ptx.cuh and wgmma.cuh: a kernel that dumps the effect of the
// instruction on a fixed input. The same sources are compiled by nvcc for a GPU and by g++ for the emulator.
// No GPU has run this yet, so there is no golden file, and the emulator is compared with expected.cpp, plain
// C++ written from the PTX documents. On a GPU, `ptx_conformance --write tests/golden/ptx_conformance.json`
// stores the results of the GPU, with its name as "source"; the emulator is then compared with those, too.
#include <cstdint>
#include <string>
#include <vector>

namespace sluice::conformance {

struct Dump {
  std::string name;
  std::vector<uint32_t> words;
  bool approximate = false;  // words are floats, right to a relative 1e-6
};

/// sm_80 and later; sm_90a.
std::vector<Dump> run_ampere();
std::vector<Dump> run_hopper();
/// The expected results, in the same order.
std::vector<Dump> expected();

uint64_t hash(const std::vector<uint32_t>& words);
/// Whether the results a and b agree.
bool agree(const Dump& a, const Dump& b);

// ---- the inputs, for kernels (which get them in global memory) and for expected()

/// 16-bit element i of data to move; all elements differ.
constexpr uint16_t moved(int i) { return static_cast<uint16_t>(i * 2 + 1); }
/// Element i of a matrix to multiply, -2 to 2: products and sums are exact in bf16 and f32.
constexpr int factor(int i) { return i * 7 % 5 - 2; }
constexpr int other_factor(int i) { return i * 11 % 5 - 2; }

constexpr int kTensorRows = 70, kTensorColumns = 72;  // what TMA reads and writes
constexpr int kBoxRows = 64, kBoxColumns = 64;
constexpr int kBoxX = 40, kBoxY = -3;  // over two of its edges
constexpr int kPlanes = 3, kPlaneRows = 20, kPlaneColumns = 40, kBoxPlaneRows = 16, kBoxPlaneColumns = 32;
constexpr int kProductDepth = 32;  // wgmma: two steps of 16

}  // namespace sluice::conformance
