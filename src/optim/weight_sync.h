#pragma once
// ZeRO's all-gather of weights (Rajbhandari et al. 2020): each rank updates its shards, and the others gather
// them before they use the weights.
#include <array>
#include <vector>

#include "comm/mesh.h"
#include "comm/queue.h"
#include "core/arena.h"
#include "core/context.h"
#include "params/param_store.h"

namespace sluice {

/// With zero_stage 0 there is nothing to do. With 1 and 2 the next forward pass gathers each unit while
/// earlier ones compute: not before, since the small messages between two steps would wait behind all of it.
/// With 3 a rank keeps its shards alone: a block's weights are gathered while the block before it computes,
/// forward and backward, and dropped two blocks later.
class WeightSync : public UnitUser {
 public:
  /// queue, moves: as GradSync's.
  WeightSync(int64_t zero_stage, ParamStore& store, const Mesh& mesh, const Mesh& moves, CommQueue* queue);

  /// After the store's.
  void allocate(Arena& arena);
  const std::vector<ParamStore::Piece>& pieces() const { return pieces_; }
  /// This rank's shard of the weights of pieces()[i].
  Tensor values(size_t i) const;

  /// The shards hold new weights.
  void changed(Context& ctx);
  /// Collective. Gathers and packs every unit that is kept whole: before weights are read between two steps,
  /// or a forward pass that other ranks do not compute.
  void settle(Context& ctx);
  void begin(Context& ctx, int unit, Pass pass) override;
  void end(Context&, int, Pass) override {}

 private:
  bool sharded() const { return zero_stage_ >= 3; }
  Communicator& ranks_of(const Bucket& b) const {
    return b.split == SplitAxis::expert ? moves_.expert_data() : moves_.tokens();
  }
  CommQueue::Ticket gather(int unit);
  void request(Context& ctx, int unit);
  void ask(int unit);
  void bring(Context& ctx, int unit);

  int64_t zero_stage_;
  ParamStore& store_;
  const Mesh &mesh_, &moves_;
  CommQueue* queue_;
  std::vector<ParamStore::Piece> pieces_;
  Tensor shards_;           // of the pieces, with zero_stage 3
  std::vector<Mark> free_;  // per unit: its weights are updated, and its memory is no longer in use
  /// Per unit, with 1 and 2: the gather under way, or one of these.
  static constexpr CommQueue::Ticket kThere = 0, kStale = -1;
  std::vector<CommQueue::Ticket> pending_;
  struct Slot {
    int unit = -1;  // whose weights are there, or being gathered
    CommQueue::Ticket ticket = 0;
    bool packed = false;
  };
  std::array<Slot, 3> slots_;
  Slot& slot(int unit) { return slots_[static_cast<size_t>(ParamStore::slot_of(unit))]; }
};

}  // namespace sluice
