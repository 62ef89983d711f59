#include "nn/attention_core.h"

namespace sluice {

NextToken::NextToken(Context& ctx, const Heads& all, const Sequence& sequences, const FusedGate& gates,
                     int64_t layer, int64_t i)
    : sequence(sequences), heads{row(all.q, i), row(all.k, i), row(all.v, i)}, gate(gates) {
  sequence.cache = sequences.caches[static_cast<size_t>(i)];
  sequence.caches = {};
  sequence.positions = row(sequences.positions, i);
  sequence.first_key = row(sequences.first_key, i);
  sequence.cache->append(ctx, layer, heads.k, heads.v);
  gate.logits = row(gates.logits, i);
  gate.y = row(gates.y, i);
}

}  // namespace sluice
