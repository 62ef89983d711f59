#pragma once
#include <optional>
#include <string>

#include "nn/rmsnorm.h"
#include "nn/sequence.h"

namespace sluice {

/// Transforms queries, or keys, for the scores: RMSNorm of every head (model.qk_norm; Dehghani et al. 2023)
/// and rotary embedding (Su et al. 2021), in the order of model.qk_norm_order.
class QkPosition {
 public:
  /// y (T, H, D) rotated. Without a norm y is x itself, rotated in place: a gate before it reads its input in
  /// backward, not its output.
  using Saved = RmsNorm::Saved;

  /// `name`: name of the norm's weight (D).
  QkPosition(const ModelConfig& config, ParamStore& store, const std::string& name);
  /// x: the input of forward, (T, H, D).
  Saved make_saved(Arena& arena, const std::string& name, const Tensor& x) const;

  /// s.y from x, which is rotated in place unless the norm comes before the rotation.
  void forward(Context& ctx, const Tensor& x, const Sequence& sequence, Saved& s) const;
  /// dx is overwritten, and may alias dy or be columns of a matrix; dy is used up. x is forward's input as
  /// forward left it.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Sequence& sequence,
                const Saved& s) const;
  /// backward's arguments for an op that computes dy and does it (AttentionGrads::queries); empty where no op
  /// can: with the norm behind the rotation.
  std::optional<PositionBackward> arguments(const Tensor& dx, const Tensor& x, const Sequence& sequence,
                                            const Saved& s) const;

 private:
  std::optional<RmsNorm> norm_;
  bool norm_first_;
};
static_assert(Layer<QkPosition, Sequence>);

}  // namespace sluice
