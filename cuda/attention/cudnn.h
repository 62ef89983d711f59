#pragma once
// cuDNN's attention (cudnn.cu), there to race against: AttentionKernel::cudnn. Its absence is an
// error by name.
#include "attention/kernels.h"

namespace sluice::cuda {

/// y must be null: cuDNN fuses no gate, attention.cu applies it after.
void attention_cudnn_forward(Context& ctx, const AttentionForward& a);
void attention_cudnn_backward(Context& ctx, const AttentionBackward& a);

}  // namespace sluice::cuda
