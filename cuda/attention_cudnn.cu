// cuDNN's attention (attention_cudnn.h). In a build without cuDNN asking for it is an error by name.
#include "attention_cudnn.h"

#if !defined(SLUICE_HAS_CUDNN)
namespace sluice::cuda {
namespace {
[[noreturn]] void absent() { fail(ExitCode::usage, "attention.kernel cudnn: this build has no cuDNN"); }
}  // namespace

void attention_cudnn_forward(Context&, const AttentionForward&) { absent(); }
void attention_cudnn_backward(Context&, const AttentionBackward&) { absent(); }

}  // namespace sluice::cuda
#endif
