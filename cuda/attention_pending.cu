// Weak places of the attention kernels that are not in the tree yet.
#include "attention_cudnn.h"

namespace sluice::cuda {

__attribute__((weak)) void attention_hopper_forward(Context&, const AttentionForward&) { fail(ExitCode::internal, "no Hopper attention"); }
__attribute__((weak)) void attention_hopper_backward(Context&, const AttentionBackward&) { fail(ExitCode::internal, "no Hopper attention"); }
__attribute__((weak)) bool attention_hopper_supports(int) { return false; }
__attribute__((weak)) void attention_cudnn_forward(Context&, const AttentionForward&) { fail(ExitCode::internal, "no cuDNN"); }
__attribute__((weak)) void attention_cudnn_backward(Context&, const AttentionBackward&) { fail(ExitCode::internal, "no cuDNN"); }

}  // namespace sluice::cuda
