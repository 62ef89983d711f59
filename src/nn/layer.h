#pragma once
// The interface common to all layers, as a concept instead of a base class.
#include <concepts>

#include "core/context.h"

namespace sluice {

/// A layer registers its parameters in its constructor. Its Saved holds the output y and the tensors that
/// backward and analysis read; make_saved allocates it once. forward computes s.y = f(x); backward computes
/// dx from dy, accumulates parameter gradients and allocates its temporaries from ctx.scratch. More:
/// additional inputs (Sequence for attention).
template <class L, class... More>
concept Layer = requires(const L& layer, Context& ctx, const Tensor& in, Tensor out, typename L::Saved& s,
                         const typename L::Saved& saved, const More&... more) {
  { s.y } -> std::convertible_to<Tensor>;
  { layer.forward(ctx, in, more..., s) } -> std::same_as<void>;
  { layer.backward(ctx, out, in, in, more..., saved) } -> std::same_as<void>;
};

}  // namespace sluice
