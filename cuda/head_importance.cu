// Negligible compared with attention: one exponential per token and head. Statistics (H, T) and headwise
// logits are read with one thread per token, elementwise logits with one warp per row of channels; a block
// sums a head over a chunk of tokens, and another block adds the chunks in order. The balance loss takes one
// block per layer. Sums are f64; chunks depend only on the shape. Not yet run on a GPU.
#include "common/map.cuh"
#include "common/math.cuh"
#include "core/targets.h"
#include "ops/head_importance.h"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 256;
constexpr int64_t kTokens = 4096;  // per chunk

template <class T>
struct Importance {
  const float *lse, *z0;
  const int* first_key;  // softmax
  const T *sink, *logits;
  const float* extra;   // (H, T): logits of a sink by query, instead of sink
  int64_t rows, width;  // tokens, and channels of a row of logits
  int heads;
  float low, range;  // a score is low + range sigmoid
  bool skip_first;
  const int* targets;  // null: no padding
  double* partials;  // (chunks, H + 1): sums, and number of tokens that count
};

/// Grid (H, chunks).
template <class T>
__global__ void __launch_bounds__(kBlock) importance_kernel(Importance<T> a) {
  const int h = static_cast<int>(blockIdx.x);
  const int64_t begin = blockIdx.y * kTokens, end = begin + kTokens < a.rows ? begin + kTokens : a.rows;
  double sum = 0;
  int counted = 0;
  if (a.logits && a.width > 1) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float share = 1.f / static_cast<float>(a.width);
    for (int64_t t = begin + static_cast<int>(threadIdx.x) / 32; t < end; t += kBlock / 32) {
      if (a.targets && a.targets[t] == kPadding) continue;  // the whole warp
      const T* const z = a.logits + (t * a.heads + h) * a.width;
      float scores = 0;
      for (int64_t c = lane; c < a.width; c += 32) scores += a.low + a.range * sigmoid(to_float(z[c]));
      sum += static_cast<double>(scores * share);
      counted += lane == 0 ? 1 : 0;
    }
  } else {
    for (int64_t t = begin + static_cast<int>(threadIdx.x); t < end; t += kBlock) {
      if (a.targets && a.targets[t] == kPadding) continue;
      float open = 0;
      bool counts = true;
      if (a.logits) {
        open = a.low + a.range * sigmoid(to_float(a.logits[t * a.heads + h]));
      } else if (a.extra) {
        open = sigmoid(a.lse[h * a.rows + t] - a.extra[h * a.rows + t]);
      } else if (a.sink) {
        open = sigmoid(a.lse[h * a.rows + t] - to_float(a.sink[h]));
      } else {
        const bool alone = a.first_key[t] == t;
        const float x = a.z0[h * a.rows + t] - a.lse[h * a.rows + t];
        open = alone ? 0.f : -expm1f(x > 0 ? 0.f : x);
        counts = !(alone && a.skip_first);
      }
      sum += static_cast<double>(open);
      counted += counts ? 1 : 0;
    }
  }
  sum = block_sum<kBlock>(sum);
  __syncthreads();
  const double all_counted = block_sum<kBlock>(static_cast<double>(counted));
  if (threadIdx.x != 0) return;
  double* const out = a.partials + blockIdx.y * static_cast<int64_t>(a.heads + 1);
  out[h] = sum;
  if (h == 0) out[a.heads] = all_counted;
}

/// One block: a thread takes columns of the row.
__global__ void __launch_bounds__(kBlock)
    importance_row_kernel(double* batch, double* totals, const double* partials, int64_t chunks, int heads,
                          double repeat) {
  for (int i = static_cast<int>(threadIdx.x); i < heads + 3; i += kBlock) {
    double sum = i == heads + 1 ? 1 : 0;
    if (i <= heads) {
      for (int64_t c = 0; c < chunks; ++c) sum += partials[c * (heads + 1) + i];
      sum *= repeat;
    }
    if (batch) batch[i] = sum;
    if (totals) totals[i] += sum;
  }
}

template <class T>
struct ImportanceBackward {
  float *dlse, *coef0, *dsink;
  const double* u;
  const float *lse, *z0;
  const int* first_key;
  const T* sink;
  const float* extra;  // (H, T), instead of sink
  const int* targets;  // null: no padding
  int64_t tokens;
};

/// A block per head.
template <class T>
__global__ void __launch_bounds__(kBlock) importance_backward_kernel(ImportanceBackward<T> a) {
  const int h = static_cast<int>(blockIdx.x);
  const float u = static_cast<float>(a.u[h]), sink = a.sink ? to_float(a.sink[h]) : 0.f;
  double sum = 0;
  for (int64_t t = static_cast<int>(threadIdx.x); t < a.tokens; t += kBlock) {
    const int64_t i = h * a.tokens + t;
    if (a.targets && a.targets[t] == kPadding) {
      a.dlse[i] = 0;
      if (a.coef0) a.coef0[i] = 0;
      continue;
    }
    if (a.extra) {
      const float x = a.lse[i] - a.extra[i];
      a.dlse[i] = u * sigmoid(x) * sigmoid(-x);
    } else if (a.sink) {
      const float x = a.lse[i] - sink, d = u * sigmoid(x) * sigmoid(-x);
      a.dlse[i] = d;
      sum += static_cast<double>(d);
    } else {
      const float x = a.z0[i] - a.lse[i], d = a.first_key[t] == t ? 0.f : u * expf(x > 0 ? 0.f : x);
      a.dlse[i] = d;
      a.coef0[i] = -d;
    }
  }
  if (!a.sink) return;  // the whole block
  sum = block_sum<kBlock>(sum);
  if (threadIdx.x == 0) a.dsink[h] -= static_cast<float>(sum);
}

struct Balance {
  double *u, *batch, *totals;
  const double *seen, *shared;  // shared null: the most important ones
  int heads;
  HeadBalance balance;
};

/// A block per layer, whose first thread does everything: about a hundred heads, once per batch.
__global__ void __launch_bounds__(32) balance_kernel(Balance a) {
  if (threadIdx.x != 0) return;
  const int H = a.heads;
  const int64_t layer = blockIdx.x, size = H + 3;
  const double *row = a.seen + layer * size, tokens = row[H];
  double* const out = a.u + layer * H;
  for (int h = 0; h < H; ++h)
    out[h] = tokens > 0 && !(a.shared && a.shared[layer * H + h] != 0) ? row[h] / tokens : -1;
  for (int64_t m = 0; m < (a.shared ? 0 : a.balance.shared_heads); ++m) {
    int best = 0;
    for (int h = 1; h < H; ++h)
      if (out[h] > out[best]) best = h;
    out[best] = -1;
  }
  double n = 0, mean = 0, squares = 0;
  for (int h = 0; h < H; ++h)
    if (out[h] >= 0) n += 1, mean += out[h];
  mean /= n > 1 ? n : 1;
  for (int h = 0; h < H; ++h)
    if (out[h] >= 0) squares += (out[h] - mean) * (out[h] - mean);
  const bool counts = n >= 2 && mean >= kLeastImportance;
  const double c = counts ? n / (n - static_cast<double>(a.balance.ddof)) : 0;
  const double scale =
      counts ? a.balance.coefficient * a.balance.token_fraction * row[H + 1] / tokens * c * 2 / (mean * mean)
             : 0;
  for (int h = 0; h < H; ++h)
    out[h] = counts && out[h] >= 0 ? scale * (out[h] - mean - squares / (n * mean)) : 0;
  const double loss = counts ? c * squares / (mean * mean) : 0;
  a.batch[layer * size + H + 2] = loss;
  if (a.totals) a.totals[layer * size + H + 2] += loss;
}

template <class T>
const T* data_or_null(const Tensor& t) {
  return t ? device_data<T>(t) : nullptr;
}

}  // namespace

void head_importance(Context& ctx, Tensor batch, Tensor totals, const HeadGate& g, int64_t tokens) {
  const int64_t heads = g.logits ? g.logits.dim(1) : g.lse.dim(0), rows = g.logits ? g.logits.dim(0) : tokens;
  const int64_t chunks = std::max<int64_t>((rows + kTokens - 1) / kTokens, 1);
  ScratchScope scratch(ctx.scratch);
  const Tensor partials = scratch.alloc("head importance", DType::f64, {chunks, heads + 1});
  if (ctx.dry_run) return;
  dispatch_storage(
      "head_importance",
      g.logits ? g.logits
      : g.sink ? g.sink
               : g.lse,
      [&](auto* tag) {
        using T = std::remove_pointer_t<decltype(tag)>;
        Importance<T> a = {};
        a.lse = data_or_null<float>(g.lse), a.z0 = data_or_null<float>(g.z0),
        a.first_key = data_or_null<int>(g.first_key);
        const bool by_query = g.sink && g.sink.rank == 2;
        a.extra = by_query ? device_data<float>(g.sink) : nullptr;
        a.sink = by_query ? nullptr : data_or_null<T>(g.sink), a.logits = data_or_null<T>(g.logits);
        a.rows = rows, a.width = g.logits && g.logits.rank == 3 ? g.logits.dim(2) : 1,
        a.heads = static_cast<int>(heads);
        const ScoreRange scores = score_range(g.kind.activation).value_or(ScoreRange{0, 1});  // of logits
        a.low = static_cast<float>(scores.low), a.range = static_cast<float>(scores.high - scores.low);
        a.skip_first = g.skip_first;
        a.targets =
            g.logits && rows == 1 ? nullptr : data_or_null<int>(g.targets);  // one gate: of all tokens
        a.partials = device_data<double>(partials);
        launch(ctx, "head_importance",
               {.grid = dim3(static_cast<unsigned>(heads), static_cast<unsigned>(chunks)),
                .block = dim3(kBlock)},
               importance_kernel<T>, a);
      });
  launch(ctx, "head_importance row", {.grid = dim3(1), .block = dim3(kBlock)}, importance_row_kernel,
         batch ? device_data<double>(batch) : nullptr, totals ? device_data<double>(totals) : nullptr,
         static_cast<const double*>(device_data<double>(partials)), chunks, static_cast<int>(heads),
         g.logits && rows == 1 ? static_cast<double>(tokens) : 1.0);
}

void head_importance_backward(Context& ctx, Tensor dlse, Tensor coef0, Tensor dsink, const Tensor& u,
                              const HeadGate& g) {
  if (ctx.dry_run) return;
  dispatch_storage("head_importance_backward", g.sink ? g.sink : g.lse, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    ImportanceBackward<T> a = {};
    a.dlse = device_data<float>(dlse);
    a.coef0 = g.sink ? nullptr : device_data<float>(coef0),
    a.dsink = dsink ? device_data<float>(dsink) : nullptr;
    a.u = device_data<double>(u), a.lse = device_data<float>(g.lse), a.z0 = data_or_null<float>(g.z0);
    a.first_key = data_or_null<int>(g.first_key), a.targets = data_or_null<int>(g.targets);
    const bool by_query = g.sink && g.sink.rank == 2;
    a.extra = by_query ? device_data<float>(g.sink) : nullptr;
    a.sink = by_query ? nullptr : data_or_null<T>(g.sink);
    a.tokens = g.lse.dim(1);
    launch(ctx, "head_importance_backward",
           {.grid = dim3(static_cast<unsigned>(g.lse.dim(0))), .block = dim3(kBlock)},
           importance_backward_kernel<T>, a);
  });
}

void head_balance(Context& ctx, Tensor u, Tensor batch, Tensor totals, const Tensor& seen,
                  const Tensor& shared, const HeadBalance& balance) {
  if (ctx.dry_run) return;
  const Balance a = {device_data<double>(u),
                     device_data<double>(batch),
                     totals ? device_data<double>(totals) : nullptr,
                     device_data<double>(seen),
                     data_or_null<double>(shared),
                     static_cast<int>(u.dim(1)),
                     balance};
  launch(ctx, "head_balance", {.grid = dim3(static_cast<unsigned>(u.dim(0))), .block = dim3(32)},
         balance_kernel, a);
}

}  // namespace sluice::cuda
