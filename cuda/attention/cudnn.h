#pragma once
// cuDNN's attention (cudnn.cu), for comparison: AttentionKernel::cudnn. Selecting it in a build without cuDNN
// is an error.
#include "attention/kernels.h"

namespace sluice::cuda {

/// y must be null: cuDNN does not fuse gates; attention.cu applies them afterwards.
void attention_cudnn_forward(Context& ctx, const AttentionForward& a);
void attention_cudnn_backward(Context& ctx, const AttentionBackward& a);

}  // namespace sluice::cuda
