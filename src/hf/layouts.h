#pragma once
// The tables of tensors: how each format of Hugging Face folders stores the model's parameters.
#include <string>
#include <vector>

#include "checkpoint/content.h"
#include "checkpoint/weight_map.h"
#include "hf/config.h"

namespace sluice {

/// All parameters of a model, without adapters.
std::vector<TensorShape> model_tensors(const ModelConfig& model, DType dtype = DType::f32);

/// Where the parameters of `model`, which the format must hold (hf/holds.h), are in a folder of this format.
/// Names are Hugging Face's own except for gates, whose weights some formats keep in q_proj:
///   qwen3_next       q_proj (heads x 2 head_dim, hidden): queries, then gate, head by head; every norm is
///                    stored as w - 1
///   gpt_oss          mlp.router; the experts' weights transposed in one tensor each (experts, in, out),
///   their
///                    biases (experts, out), with gate and up in turns;
///                    or the matrices in MXFP4, which is read alone
///   gated_attention  q_proj: the queries of a key/value head's group, then the group's gates, group by group
///   others           as in a checkpoint
/// Reading and writing both follow it.
WeightMap weight_map(HfFormat format, const ModelConfig& model);

}  // namespace sluice
