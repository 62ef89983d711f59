#pragma once
// What a test asks of the fake NCCL.

namespace emu {

/// From now on every operation of this rank, in whatever communicator, fails some time after it began; -1:
/// none.
void fail_nccl_on(int rank);

}  // namespace emu
