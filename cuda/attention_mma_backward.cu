#include "attention_f32.h"
#include "attention_kernels.h"

namespace sluice::cuda {
namespace {

template <class T>
Tensor view(T* data, DType dtype, std::initializer_list<int64_t> dims) {
  return Tensor(const_cast<void*>(static_cast<const void*>(data)), dtype, dims, "", Device::cuda);
}

}  // namespace

void attention_mma_backward(Context& ctx, const AttentionBackward& a) {
  const auto rows = [&](const nv_bf16* p) { return view(p, DType::bf16, {a.tokens, a.heads, a.head_dim}); };
  const auto kv = [&](const nv_bf16* p) { return view(p, DType::bf16, {a.tokens, a.kv_heads, a.head_dim}); };
  attention_f32_backward(ctx, rows(a.dq), kv(a.dk), kv(a.dv), rows(a.d_o), rows(a.q), kv(a.k), kv(a.v), view(a.lse, DType::f32, {a.heads, a.tokens}), a.delta, view(a.first_key, DType::i32, {a.tokens}), a.scale, a.coef0 ? view(a.coef0, DType::f32, {a.heads, a.tokens}) : Tensor());
}

}  // namespace sluice::cuda
