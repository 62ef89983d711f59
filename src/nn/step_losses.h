#pragma once
// The losses of a training step beside the text's: a new one is a struct (nn/step_loss.h), a member of
// StepLoad where the model's passes need something of it, and an entry in StepLosses.
#include "nn/head_balance_state.h"
#include "nn/indexer_loss.h"
#include "nn/logit_z_loss.h"
#include "nn/router_balance_state.h"
#include "nn/step_loss.h"

namespace sluice {

/// What the step's losses add up over its micro-batches, and what their gradients need. Empty parts are not
/// asked for.
struct StepLoad {
  RouterLoad routers;
  HeadLoad heads;
  LogitZLoss logits;
  IndexerLoad indexers;
};

/// All of them, in the order in which their numbers are written down.
using StepLosses =
    StepLossTuple<StepLoad, RouterBalanceState, HeadBalanceState, LogitZLossState, IndexerLossState>;

}  // namespace sluice
