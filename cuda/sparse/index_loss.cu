// The indexer's loss. Queries are taken in chunks: a block per query (and index set) computes attention's
// mean over heads on the query's scored keys, the index scores, the divergence, the gradients of the products
// of every index head, which it leaves for the keys, and dq; then blocks of keys collect dk from the chunk's
// queries in ascending order, so that bits do not depend on the schedule. A thread takes a key at a time in
// the products, a channel in the sums. Attention's mean, most of the work, comes from tensor cores where they
// support it (index_target.cu); the rest is FMA, and nothing of size Tq x Tk is stored. Not yet run on a GPU.
#include "common/rows.cuh"
#include "sparse/index.cuh"
#include "sparse/index_target.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256, kKeys = 32;            // keys of a block that collects dk
constexpr int kHeadsAtOnce = 4;                      // whose products a thread keeps in registers
constexpr int64_t kChunkBytes = int64_t{256} << 20;  // for queries to fill a GPU with

template <class T>
struct Loss {
  Index<T> index;
  const T *q, *k;  // of attention
  const float* lse;
  const int *targets, *first, *count;  // first, count: null for all candidates
  const double* gradient_scale;
  const T* log_temperature;    // or null
  float *target, *score, *du;  // (chunk, G, row), the same, (chunk, J, row)
  int* scored;                 // (chunk, G): scored blocks that count
  double *kl, *dlog;           // (G, Tq); kl < 0: not counted
  float *dw, *dbias;           // (Tq, J)
  T* dq;
  T* dw_out;  // (Tq, J), or null
  float* dk;  // (Tk, d)
  double coefficient;
  int64_t t0, row, room;
  int heads, kv_heads, depth;
  float scale, given_temperature;
  bool has_target;                  // `target` holds attention's mean already
  bool key_vectors, index_vectors;  // rows of k, and of the index keys, are whole vectors of 16 bytes

  DEVICE_INLINE float temperature() const {
    return log_temperature ? expf(to_float(*log_temperature)) : given_temperature;
  }
  DEVICE_INLINE float weight() const { return static_cast<float>(coefficient * *gradient_scale); }
  /// Where the e-th scored block of a query begins.
  DEVICE_INLINE int start(int set, int64_t t, int e) const {
    if (!first) return index.first_key[t] + e * index.block;
    return first[(set * index.queries + t) * room + e];
  }
  DEVICE_INLINE int blocks(int set, int64_t t) const {
    if (!first) return index.candidates(t);
    return count[set * index.queries + t] - (index.block > 1);
  }
};

/// The products of up to kHeadsAtOnce rows of n numbers and b.
template <int kVector, class T>
DEVICE_INLINE void dots_of_vectors(float (&sums)[kHeadsAtOnce], const float* rows, int heads, const T* b,
                                   int n) {
#pragma unroll
  for (int h = 0; h < kHeadsAtOnce; ++h) sums[h] = 0;
  for (int d0 = 0; d0 < n; d0 += kVector) {
    const auto x = load_vec<kVector>(b + d0);
#pragma unroll
    for (int d = 0; d < kVector; ++d)
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h)
        if (h < heads) sums[h] += rows[h * n + d0 + d] * to_float(x.v[d]);
  }
}

template <class T>
DEVICE_INLINE void dots(float (&sums)[kHeadsAtOnce], const float* rows, int heads, const T* b, int n,
                        bool vectors) {
  if (vectors)
    dots_of_vectors<16 / static_cast<int>(sizeof(T))>(sums, rows, heads, b, n);
  else
    dots_of_vectors<1>(sums, rows, heads, b, n);
}

/// Attention on block e of query t: the mean over the set's heads. q (heads of the set, D) is scaled.
template <class T>
DEVICE_INLINE float attention_on(const Loss<T>& p, const float* q, int set, int64_t t, int start) {
  const int group = p.heads / p.kv_heads, per_set = p.kv_heads / p.index.sets;
  const int end = min(start + p.index.block, p.index.last(t) + 1);
  float sum = 0;
  for (int s = start; s < end; ++s)
    for (int g = 0; g < per_set; ++g) {
      const int kv_head = set * per_set + g;
      const T* const key = p.k + (static_cast<int64_t>(s) * p.kv_heads + kv_head) * p.depth;
      for (int h0 = 0; h0 < group; h0 += kHeadsAtOnce) {
        const int heads = min(kHeadsAtOnce, group - h0);
        float z[kHeadsAtOnce];
        dots(z, q + (g * group + h0) * p.depth, heads, key, p.depth, p.key_vectors);
#pragma unroll
        for (int h = 0; h < kHeadsAtOnce; ++h)
          if (h < heads) sum += expf(z[h] - p.lse[(kv_head * group + h0 + h) * p.index.queries + t]);
      }
    }
  return sum / static_cast<float>(per_set * group);
}

/// Grid (queries of the chunk, sets).
template <class T>
__global__ void __launch_bounds__(kThreads, 2) loss_queries_kernel(Loss<T> p) {
  DYN_SMEM(float, smem, 16);
  const Index<T>& x = p.index;
  const int thread = static_cast<int>(threadIdx.x), set = static_cast<int>(blockIdx.y), per_set = x.per_set(),
            head0 = set * per_set, set_heads = p.heads / x.sets;
  const int64_t i = blockIdx.x, t = p.t0 + i, at = t * x.heads + head0;
  float *const q = smem, *const index_q = q + set_heads * p.depth;  // scaled
  for (int e = thread; e < set_heads * p.depth; e += kThreads)
    q[e] = to_float(p.q[(t * p.heads + set * set_heads) * p.depth + e]) * p.scale;
  for (int e = thread; e < per_set * x.depth; e += kThreads)
    index_q[e] = to_float(x.q[at * x.depth + e]) * x.scale;
  __syncthreads();
  float *const target = p.target + (i * x.sets + set) * p.row,
               *const score = p.score + (i * x.sets + set) * p.row,
               *const du = p.du + (i * x.heads + head0) * p.row;
  const bool counted = p.targets[t] >= 0;
  int n = counted ? p.blocks(set, t) : 0;

  double mass = 0;
  for (int e = thread; e < n; e += kThreads) {
    if (!p.has_target) target[e] = attention_on(p, q, set, t, p.start(set, t, e));
    mass += static_cast<double>(target[e]);
  }
  mass = block_sum<kThreads>(mass);
  if (!(mass > 1e-20)) n = 0;

  // A thread reads but its own target, score and du until the sums over keys, which a barrier precedes.
  const float tau = p.temperature(), weight = p.weight();
  float top = -INFINITY;
  for (int e = thread; e < n; e += kThreads) {
    const T* const key = x.k + static_cast<int64_t>(p.start(set, t, e)) * x.depth;
    float sum = 0;
    for (int j0 = 0; j0 < per_set; j0 += kHeadsAtOnce) {
      const int heads = min(kHeadsAtOnce, per_set - j0);
      float products[kHeadsAtOnce];
      dots(products, index_q + j0 * x.depth, heads, key, x.depth, p.index_vectors);
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; ++i) {
        if (i >= heads) continue;
        const int j = j0 + i;
        const float u = products[i] + x.bias_of(head0 + j);
        du[j * p.row + e] = u;
        sum += x.head_weight(t, head0 + j) * x.activate(u);
      }
    }
    score[e] = sum;
    top = fmaxf(top, sum);
  }
  STATIC_SMEM(float, tops, [kThreads / 32]);
  top = warp_max(top);
  if (thread % 32 == 0) tops[thread / 32] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) top = fmaxf(top, tops[w]);
  top *= tau;
  double normaliser = 0;
  for (int e = thread; e < n; e += kThreads) normaliser += static_cast<double>(expf(score[e] * tau - top));
  const float lse = top + logf(static_cast<float>(block_sum<kThreads>(normaliser))),
              inverse = 1.0f / static_cast<float>(mass);
  double kl = 0, dlog = 0;
  for (int e = thread; e < n; e += kThreads) {
    const float scaled = score[e] * tau, log_pi = scaled - lse, share = target[e] * inverse,
                difference = expf(log_pi) - share;
    kl += static_cast<double>(share * (logf(fmaxf(share, 1e-37f)) - log_pi));
    dlog += static_cast<double>(difference * scaled);
    score[e] = difference * tau;
  }
  kl = block_sum<kThreads>(kl);
  dlog = block_sum<kThreads>(dlog);
  for (int j = 0; j < per_set; ++j) {
    const float head_weight = x.head_weight(t, head0 + j);
    double dweight = 0, dbias = 0;
    for (int e = thread; e < n; e += kThreads) {
      const float u = du[j * p.row + e], value = x.activate(u), d = score[e] * weight,
                  slope = d * head_weight * x.slope(u, value);
      dweight += static_cast<double>(d * value), dbias += static_cast<double>(slope);
      du[j * p.row + e] = slope;
    }
    dweight = block_sum<kThreads>(dweight);
    dbias = block_sum<kThreads>(dbias);
    if (thread > 0) continue;
    if (x.weights_by_sigmoid) dweight *= static_cast<double>(head_weight * (1.0f - head_weight));
    p.dw[at + j] = static_cast<float>(dweight), p.dbias[at + j] = static_cast<float>(dbias);
    if (p.dw_out) p.dw_out[at + j] = from_float<T>(static_cast<float>(dweight));
  }
  if (thread == 0) {
    const int64_t of = set * x.queries + t;
    p.scored[i * x.sets + set] = n;
    p.kl[of] = counted ? fmax(n > 0 ? kl : 0.0, 0.0) : -1.0;
    p.dlog[of] = n > 0 ? dlog * static_cast<double>(weight) : 0.0;
  }
  __syncthreads();  // all of du
  for (int c = thread; c < per_set * x.depth; c += kThreads) {
    const float* const row = du + c / x.depth * p.row;
    float sum = 0;
    for (int e = 0; e < n; ++e)
      sum += row[e] * to_float(x.k[static_cast<int64_t>(p.start(set, t, e)) * x.depth + c % x.depth]);
    p.dq[at * x.depth + c] = from_float<T>(sum * x.scale);
  }
}

/// A block per kKeys keys; queries [t0, t0 + chunk). A thread owns channels, and adds up in dynamic shared
/// memory (kKeys, d).
template <class T>
__global__ void __launch_bounds__(kThreads) loss_keys_kernel(Loss<T> p, int64_t chunk) {
  DYN_SMEM(float, sums, 16);
  STATIC_SMEM(int, from, [kThreads]);
  STATIC_SMEM(int, to, [kThreads]);
  const Index<T>& x = p.index;
  const int thread = static_cast<int>(threadIdx.x), per_set = x.per_set();
  const int64_t k0 = static_cast<int64_t>(blockIdx.x) * kKeys, k1 = min(k0 + kKeys, x.keys);
  // Queries before the first key do not see it.
  const int64_t t_begin = max(p.t0, static_cast<int64_t>(x.own.first_query(static_cast<int>(k0)))),
                pairs = (p.t0 + chunk - t_begin) * x.sets;
  if (pairs <= 0) return;  // the whole block
  for (int i = thread; i < kKeys * x.depth; i += kThreads) sums[i] = 0;
  for (int64_t first = 0; first < pairs; first += kThreads) {
    __syncthreads();  // the parts of the last turn have been read
    const int64_t mine = first + thread;
    if (mine < pairs) {  // the part of this query's scored blocks that begins with these keys
      const int64_t t = t_begin + mine / x.sets;
      const int set = static_cast<int>(mine % x.sets), n = p.scored[(t - p.t0) * x.sets + set];
      const auto lower_bound = [&](int64_t key) {
        int low = 0, high = n;
        while (low < high) {
          const int middle = (low + high) / 2;
          if (p.start(set, t, middle) < key)
            low = middle + 1;
          else
            high = middle;
        }
        return low;
      };
      from[thread] = lower_bound(k0), to[thread] = lower_bound(k1);
    }
    __syncthreads();
    const int here = static_cast<int>(min(static_cast<int64_t>(kThreads), pairs - first));
    for (int i = 0; i < here; ++i) {
      if (from[i] == to[i]) continue;
      const int64_t t = t_begin + (first + i) / x.sets;
      const int set = static_cast<int>((first + i) % x.sets), head0 = set * per_set;
      for (int c = thread; c < x.depth; c += kThreads)
        for (int j = 0; j < per_set; ++j) {
          const float q = to_float(x.q[(t * x.heads + head0 + j) * x.depth + c]) * x.scale;
          const float* const du = p.du + ((t - p.t0) * x.heads + head0 + j) * p.row;
          for (int e = from[i]; e < to[i]; ++e)
            sums[(p.start(set, t, e) - static_cast<int>(k0)) * x.depth + c] += du[e] * q;
        }
    }
  }
  __syncthreads();
  for (int i = thread; i < static_cast<int>(k1 - k0) * x.depth; i += kThreads)
    p.dk[k0 * x.depth + i] += sums[i];
}

constexpr int kSumThreads = 1024;

/// One block.
__global__ void __launch_bounds__(kSumThreads)
    loss_sums_kernel(double* sums, float* dlog_temperature, const double* kl, const double* dlog,
                     int64_t rows) {
  double divergence = 0, counted = 0, slope = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kSumThreads) {
    slope += dlog[row];
    if (kl[row] >= 0) divergence += kl[row], counted += 1;
  }
  divergence = block_sum<kSumThreads>(divergence);
  counted = block_sum<kSumThreads>(counted);
  slope = block_sum<kSumThreads>(slope);
  if (threadIdx.x > 0) return;
  if (dlog_temperature) *dlog_temperature += static_cast<float>(slope);
  if (sums) sums[kIndexLoss] += divergence, sums[kIndexCounted] += counted;
}

struct Identity {
  DEVICE_INLINE float operator()(float x) const { return x; }
};

template <class T>
void run_loss(Context& ctx, const IndexGrads& grads, const Tensor& sums, const IndexInputs& in,
              const IndexTarget& target, const Selection* selection, const IndexLoss& loss) {
  const int64_t queries = in.q.dim(0), heads = in.q.dim(1), depth = in.q.dim(2), sets = in.sets,
                room = selection ? selection->first.dim(2) : most_candidates(in), row = (room + 3) / 4 * 4,
                chunk = queries_at_once(queries, (heads + 2 * sets) * row * 4, kChunkBytes);
  ScratchScope scratch(ctx.scratch);
  const auto floats = [&](const char* name, int64_t rows, int64_t columns) {
    return device_data<float>(scratch.alloc(name, DType::f32, {rows, columns}));
  };
  const auto doubles = [&](const char* name) {
    return device_data<double>(scratch.alloc(name, DType::f64, {sets, queries}));
  };
  Loss<T> p = {};
  p.target = floats("index target", chunk * sets, row);
  p.score = floats("index score", chunk * sets, row);
  p.du = floats("index du", chunk * heads, row);
  p.scored = device_data<int>(scratch.alloc("index scored", DType::i32, {chunk, sets}));
  p.kl = doubles("index kl");
  p.dlog = doubles("index dlog");
  p.dw = floats("index dw", queries, heads);
  p.dbias = floats("index dbias", queries, heads);
  const Tensor dk = scratch.alloc("index dk", DType::f32, {in.k.dim(0), depth});
  const VisibleKeys visible = visible_keys(ctx, scratch, in.first_key, in.own_key, in.k.dim(0));
  if (ctx.dry_run || queries == 0) return;
  p.dk = device_data<float>(dk);
  p.index = index_of<T>(in, visible);
  p.q = device_data<T>(target.q), p.k = device_data<T>(target.k);
  p.lse = device_data<float>(target.lse), p.targets = device_data<int>(target.targets);
  p.first = selection ? device_data<int>(selection->first) : nullptr;
  p.count = selection ? device_data<int>(selection->count) : nullptr;
  p.gradient_scale = device_data<double>(loss.gradient_scale);
  p.log_temperature = loss.log_temperature ? device_data<T>(loss.log_temperature) : nullptr;
  p.dq = device_data<T>(grads.dq), p.dw_out = grads.dw ? device_data<T>(grads.dw) : nullptr;
  p.coefficient = loss.coefficient, p.given_temperature = static_cast<float>(loss.temperature);
  const auto vectors = [](const Tensor& k) {
    return aligned(k.data) && k.dim(k.rank - 1) * dtype_size(k.dtype) % 16 == 0;
  };
  p.key_vectors = vectors(target.k), p.index_vectors = vectors(in.k);
  p.has_target = target_on_tensor_cores(target);
  p.row = row, p.room = room;
  p.heads = static_cast<int>(target.q.dim(1)), p.kv_heads = static_cast<int>(target.k.dim(1));
  p.depth = static_cast<int>(target.q.dim(2)), p.scale = static_cast<float>(target.scale);
  check(cudaMemsetAsync(p.dk, 0, static_cast<size_t>(dk.bytes()), stream(ctx)), "cudaMemsetAsync",
        "index dk");
  const auto set_rows = static_cast<size_t>((target.q.numel() / queries + heads * depth) / sets);
  for (p.t0 = 0; p.t0 < queries; p.t0 += chunk) {
    const int64_t here = chunk < queries - p.t0 ? chunk : queries - p.t0;
    if (p.has_target) attention_targets(ctx, p.target, row, p.t0, here, in, visible, target, selection);
    launch(ctx, "index_loss_queries",
           {.grid = dim3(static_cast<unsigned>(here), static_cast<unsigned>(sets)),
            .block = dim3(kThreads),
            .smem = set_rows * sizeof(float)},
           loss_queries_kernel<T>, p);
    // Keys after the chunk's last query have no part in it, but only the device knows other queries' places.
    launch(ctx, "index_loss_keys",
           {.grid = dim3(blocks_for(in.own_key ? in.k.dim(0) : p.t0 + here, kKeys)),
            .block = dim3(kThreads),
            .smem = static_cast<size_t>(kKeys * depth) * sizeof(float)},
           loss_keys_kernel<T>, p, here);
  }
  const UnaryMap<Identity, T, float> store = {device_data<T>(grads.dk), p.dk, {}};
  map(ctx, "index_loss_dk", store, dk.numel(), aligned(store.y, store.x));
  if (grads.dbias)
    column_sums(ctx, "index_dbias", device_data<float>(grads.dbias), p.dbias, queries, heads, Into::add);
  if (grads.dw_bias)
    column_sums(ctx, "index_dw_bias", device_data<float>(grads.dw_bias), p.dw, queries, heads, Into::add);
  launch(ctx, "index_loss_sums", {.grid = dim3(1), .block = dim3(kSumThreads)}, loss_sums_kernel,
         sums ? device_data<double>(sums) : nullptr,
         loss.log_temperature ? device_data<float>(grads.dlog_temperature) : nullptr,
         static_cast<const double*>(p.kl), static_cast<const double*>(p.dlog), sets * queries);
}

}  // namespace

void index_loss(Context& ctx, const IndexGrads& grads, Tensor sums, const IndexInputs& in,
                const IndexTarget& target, const Selection* selection, const IndexLoss& loss) {
  dispatch_storage("index_loss", in.q, [&](auto* storage) {
    run_loss<std::remove_pointer_t<decltype(storage)>>(ctx, grads, sums, in, target, selection, loss);
  });
}

}  // namespace sluice::cuda
