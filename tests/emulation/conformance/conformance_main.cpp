// ptx_conformance [--write FILE]: runs every micro-test, compares it with expected() and prints differences;
// exit status 1 if there are any. --write stores the results of this device (and its name) as the golden file
// for the emulator.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "conformance.h"

int main(int argc, char** argv) {
  using namespace sluice::conformance;
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) {
    std::fprintf(stderr, "ptx_conformance: no CUDA device\n");
    return 1;
  }
  std::vector<Dump> dumps = run_ampere();
  const size_t ampere = dumps.size();
  if (properties.major >= 9)
    for (Dump& d : run_hopper()) dumps.push_back(std::move(d));
  const std::vector<Dump> right = expected();
  int differ = 0;
  for (size_t i = 0; i < dumps.size(); ++i) {
    const bool ok = agree(dumps[i], right[i]);
    differ += !ok;
    std::printf("%-45s %s\n", dumps[i].name.c_str(), ok ? "as expected" : "DIFFERS");
    for (size_t w = 0, shown = 0; !ok && w < dumps[i].words.size() && shown < 4; ++w)
      if (dumps[i].words[w] != right[i].words[w])
        std::printf("    word %zu: %08x, expected %08x\n", w, dumps[i].words[w], right[i].words[w]), ++shown;
  }
  std::printf("%s: %zu tests%s, %d differ\n", properties.name, dumps.size(),
              dumps.size() == ampere ? " (those of sm_90 need a Hopper GPU)" : "", differ);

  if (argc == 3 && std::strcmp(argv[1], "--write") == 0) {
    nlohmann::ordered_json golden;
    golden["source"] = properties.name;
    for (const Dump& d : dumps) {
      nlohmann::ordered_json& test = golden["tests"][d.name];
      if (d.approximate)
        test["words"] = d.words;
      else
        test["hash"] = hash(d.words);
    }
    std::ofstream file(argv[2]);
    file << golden.dump(1) << "\n";
    if (!file) {
      std::perror(argv[2]);
      return 1;
    }
  }
  return differ ? 1 : 0;
}
