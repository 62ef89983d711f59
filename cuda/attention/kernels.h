#pragma once
// Interface between the ops in attention.cu and the kernels: one for every GPU since sm_80 (mma.cu,
// mma_backward.cu), one for Hopper (hopper_forward.cu, hopper_backward.cu). All tensors are bf16 unless
// noted; layouts as in ops/attention.h.
#include "attention/visible_keys.cuh"
#include "ops/gate.h"
#include "ops/norm_rope.h"

namespace sluice::cuda {

struct AttentionForward {
  const nv_bf16 *q, *k, *v;  // (Tq, H, D), (Tk, Hkv, D)
  VisibleKeys visible;
  nv_bf16* o;       // (Tq, H, D)
  float *lse, *z0;  // (H, Tq), natural logarithm; z0 may be null
  // The fused output; y is null for plain attention. y = gate(sigmoid(lse - sink) o, gate)
  nv_bf16* y;
  const nv_bf16* sink;  // (H), or null
  const nv_bf16* gate;  // (Tq, H, D), headwise (Tq, H), or null; scores specific to a head
  bool headwise;
  GateKind kind;
  int64_t queries, keys;
  int heads, kv_heads, head_dim;  // head_dim 64, 128 or 256
  float scale;
};

struct AttentionBackward {
  const nv_bf16 *q, *k, *v, *d_o;
  const float* lse;    // (H, Tq)
  const float* delta;  // (H, Tq): <dO_t, O_t> - dlse_t
  const float* coef0;  // (H, Tq), or null
  const nv_bf16*
      o;  // (Tq, H, D): the plain output, and whether delta holds more than <dO_t, O_t>. For cuDNN, which
  bool has_dlse;  // computes delta itself
  VisibleKeys visible;
  nv_bf16 *dq, *dk, *dv;
  /// How the queries were made: Hopper's kernels, which alone read it, write the dx of this instead of dq.
  /// Aligned for vectors of 16 bytes; null: dq.
  const PositionBackward* made;
  int64_t dv_row;  // elements from one token's dv to the next's
  int64_t queries, keys;
  int heads, kv_heads, head_dim;
  float scale;
};

// Like ops, they allocate their scratch memory first and return in a dry run.
void attention_mma_forward(Context& ctx, const AttentionForward& a);
void attention_mma_backward(Context& ctx, const AttentionBackward& a);
/// sm_90 only.
void attention_hopper_forward(Context& ctx, const AttentionForward& a);
void attention_hopper_backward(Context& ctx, const AttentionBackward& a);
/// head_dims that the Hopper kernels support.
bool attention_hopper_supports(int head_dim);

}  // namespace sluice::cuda
