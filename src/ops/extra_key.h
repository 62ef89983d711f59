#pragma once
// One key more, which every query sees: it joins attention behind the kernel, from the row log-sum-exp alone.
//   x_th = scale <q_t^h, k_x>,   G = sigmoid(lse - x),   y_t^h = G o_t^h + (1 - G) v_x
// is softmax([scores, x]) [V; v_x]. With the value 0 it is a sink whose logit depends on the query; with a
// learned key and value it is the attention bias k', v' of Sun et al. 2024 (arXiv 2402.17762; the
// authors' gpt-2/model_attn_bias.py). README.md: gradients.
// H query heads share the Hx extra keys as they share key heads: head h has the extra key h / (H / Hx).
#include "core/context.h"

namespace sluice {

struct ExtraKey {
  Tensor key = {};     // (Hx, D) of q's dtype; empty: there is no extra key
  Tensor value = {};   // (Hx, D), or empty: 0
  Tensor logits = {};  // (H, T) of accumulate_dtype: x, written by forward
};

/// logits (H, T) = x, overwritten, from q (T, H, D) and key (Hx, D).
void extra_key_logits(Context& ctx, Tensor logits, const Tensor& q, const Tensor& key, double scale);

/// y (T, H, D) overwritten, from o (T, H, D), which it may alias, and lse (H, T).
void extra_key_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const ExtraKey& extra);

/// d_o (T, H, D) = G dy and dlse (H, T) = G (1 - G) <dy, o - v_x>, both overwritten; the gradient of x is
/// -dlse. dvalue (Hx, D) of accumulate_dtype += sum (1 - G) dy; empty without a value. d_o may alias dy.
void extra_key_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dvalue, const Tensor& dy,
                        const Tensor& o, const Tensor& lse, const ExtraKey& extra);

/// From the gradient -dlse of x: dq (T, H, D) -= scale dlse k_x, and dkey (Hx, D) of accumulate_dtype -=
/// scale sum dlse q, both added to. Sums over tokens are taken in an order that depends on the shape alone.
void extra_key_logits_backward(Context& ctx, Tensor dq, Tensor dkey, const Tensor& dlse, const Tensor& q,
                               const Tensor& key, double scale);

}  // namespace sluice
