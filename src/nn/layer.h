#pragma once
// What every layer has in common, checked rather than inherited.
#include <concepts>

#include "core/context.h"

namespace sluice {

/// A layer registers its parameters when constructed. Its Saved holds the output y and what backward and
/// analysis read; make_saved allocates it once. forward fills s.y = f(x); backward makes dx of dy, adds to
/// the gradients of the parameters and takes its temporaries from ctx.scratch. More: what it needs besides
/// (Sequence for attention).
template <class L, class... More>
concept Layer = requires(const L& layer, Context& ctx, const Tensor& in, Tensor out, typename L::Saved& s,
                         const typename L::Saved& saved, const More&... more) {
  { s.y } -> std::convertible_to<Tensor>;
  { layer.forward(ctx, in, more..., s) } -> std::same_as<void>;
  { layer.backward(ctx, out, in, in, more..., saved) } -> std::same_as<void>;
};

}  // namespace sluice
