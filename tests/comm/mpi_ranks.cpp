// Run by mpirun: every rank checks its communicator and prints the result.
#include <cstdio>
#include <cstdlib>

#include "comm/conformance.h"
#include "comm/mpi.h"

int main(int argc, char** argv) {
  using namespace sluice;
  try {
    const auto world = make_world();
    const int expected = argc > 1 ? std::atoi(argv[1]) : 1;
    if (world->size() != expected)
      throw std::runtime_error("the world has " + std::to_string(world->size()) + " ranks");
    test::check_communicator(*world);
    if (world->rank() == 0) std::printf("%d ranks of %s agree\n", world->size(), world->name().c_str());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_ranks: %s\n", error.what());
    return 1;
  }
}
