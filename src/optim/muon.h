#pragma once
// Which parameters Muon updates, and their update (ops/muon.h).
#include <vector>

#include "config/config.h"
#include "params/param_store.h"

namespace sluice {

class Muon {
 public:
  /// Matrices of blocks whose layer has nothing against it: projections, gates, feed-forward networks, every
  /// expert by itself. Not embedding and head, norms, sinks and learned constants (which do not decay), nor
  /// routers.
  static bool takes(const ParamSpec& spec) {
    return spec.unit > 0 && spec.shape.size() == 2 && spec.weight_decay && spec.orthogonal;
  }

  explicit Muon(const MuonConfig& config) : config_(config) {}
  /// lr_multiplier: of the learning rate that the step's control holds.
  void add(ParamStore::Id id, double lr_multiplier, double weight_decay) {
    matrices_.push_back({id, lr_multiplier, weight_decay});
  }

  /// Once control is judged. m and master: laid out like the store's values; master may be empty. One matrix
  /// after the other; scratch is that of the largest.
  void update(Context& ctx, const ParamStore& store, const Tensor& m, const Tensor& master,
              const Tensor& control) const;

 private:
  struct Matrix {
    ParamStore::Id id;
    double lr_multiplier, weight_decay;
  };
  MuonConfig config_;
  std::vector<Matrix> matrices_;
};

}  // namespace sluice
