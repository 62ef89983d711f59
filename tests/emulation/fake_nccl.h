#pragma once
// Controls of the fake NCCL for tests.

namespace emu {

/// From now on every operation of this rank, in any communicator, fails some time after its start; -1: none.
void fail_nccl_on(int rank);

}  // namespace emu
