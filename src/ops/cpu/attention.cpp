// Attention's forward, and the distribution of work over threads. Blocks of rows: attention_rows.h; one
// query: attention_decode.h; packed operands and their products, by vectors or tiles: attention_operands.h;
// the vectors' products, exp and transposes: attention_blocks.h; backward: attention_backward.h.
// Compute-bound: by vectors the products reach 80 to 95 % of the FMA peak, forward as a whole about 50 %,
// backward 55 to 60 % (AVX-512; with AVX2 60 and 70 %).
#include "ops/attention.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/cpu_features.h"
#include "core/parallel_for.h"

// In this order.
// clang-format off
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
#include "ops/cpu/attention_blocks.h"
#include "ops/cpu/attention_rows.h"
#include "ops/cpu/pairs.h"
#include "ops/cpu/tile_units.h"
#include "ops/cpu/attention_operands.h"
#include "ops/cpu/gathered_rows.h"
#include "ops/cpu/attention_decode.h"
#include "ops/cpu/attention_backward.h"
// clang-format on

namespace {

// ---- forward ----

template <class Operands, class T>
int64_t forward_workspace(const Problem<T>& p) {
  return Operands::forward_size(p) + (p.padded_depth + kKeys) * kLaneStride;
}

/// One step of the online softmax: s becomes exp(s - m) with the new row maxima m; l are the row sums; alpha
/// is the factor for earlier sums and outputs.
template <class A>
void softmax_step(A* s, int64_t keys, int64_t lanes, A* m, A* l, A* alpha) {
  for (int64_t i = 0; i < lanes; i += Simd<A>::kWidth) {
    const Vec<A> m_old = load_vec(m + i);
    Vec<A> m0 = m_old, m1 = m_old;
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
      const Vec<A> a = load_vec(s + j * kLaneStride + i), b = load_vec(s + (j + 1) * kLaneStride + i);
      m0 = m0 > a ? m0 : a;
      m1 = m1 > b ? m1 : b;
    }
    if (j < keys) {
      const Vec<A> a = load_vec(s + j * kLaneStride + i);
      m0 = m0 > a ? m0 : a;
    }
    const Vec<A> m_new = m0 > m1 ? m0 : m1;
    const Vec<A> rescale = exp_vec(m_old - m_new);
    Vec<A> sum = load_vec(l + i) * rescale;
    for (j = 0; j < keys; ++j) {
      A* x = s + j * kLaneStride + i;
      const Vec<A> e = exp_vec(load_vec(x) - m_new);
      store_vec(x, e);
      sum += e;
    }
    store_vec(m + i, m_new);
    store_vec(l + i, sum);
    store_vec(alpha + i, rescale);
  }
}

/// The same for softpick: s becomes relu(e^(s - m) - e^-m), with maxima m of at least 0, so that no
/// exponential overflows in rows of negative scores; l are the sums of the magnitudes.
template <class A>
void softpick_step(A* s, int64_t keys, int64_t lanes, A* m, A* l, A* alpha) {
  const Vec<A> zero{};
  for (int64_t i = 0; i < lanes; i += Simd<A>::kWidth) {
    const Vec<A> m_old = load_vec(m + i);
    Vec<A> m_new = m_old;
    for (int64_t j = 0; j < keys; ++j) {
      const Vec<A> a = load_vec(s + j * kLaneStride + i);
      m_new = m_new > a ? m_new : a;
    }
    const Vec<A> rescale = exp_vec(m_old - m_new), one = exp_vec(zero - m_new);
    Vec<A> sum = load_vec(l + i) * rescale;
    for (int64_t j = 0; j < keys; ++j) {
      A* x = s + j * kLaneStride + i;
      const Vec<A> above = exp_vec(load_vec(x) - m_new) - one, below = zero - above;
      store_vec(x, above > 0 ? above : zero);
      sum += above > 0 ? above : below;
    }
    store_vec(m + i, m_new);
    store_vec(l + i, sum);
    store_vec(alpha + i, rescale);
  }
}

/// log relu(e^x - 1)
template <class A>
A log_pick(A x) {
  return x > 0 ? x + std::log(-std::expm1(-x)) : -std::numeric_limits<A>::infinity();
}

template <class Operands, class T>
void forward_block(const Problem<T>& p, int64_t kv_head, int64_t row, int64_t count, accumulate_t<T>* work,
                   T* o, accumulate_t<T>* lse, accumulate_t<T>* z0) {
  using A = accumulate_t<T>;
  const RowBlock<T> block(p, kv_head, row, count);
  A* const o_t = work;
  A* const s = o_t + p.padded_depth * kLaneStride;
  Operands operands(s + kKeys * kLaneStride, p, false);
  alignas(64) A m[kLanes], l[kLanes], alpha[kLanes];
  // Half the lowest number, so that a lane without visible keys does not compute exp(-inf - -inf).
  std::fill_n(m, kLanes, p.softpick ? A(0) : std::numeric_limits<A>::lowest() / 2);
  std::fill_n(l, kLanes, A(0));

  const T* q_rows[kLanes];
  block.pointers(q_rows, p.q, p);
  operands.load_queries(q_rows, count, block.lanes);
  std::fill_n(o_t, p.padded_depth * kLaneStride, A(0));
  // A row's bits depend on how the keys are divided: from the first one on that a row of the block sees, or,
  // for independent rows, alike for every block.
  const int64_t unit = p.independent_rows ? Operands::kStep : 1,
                begin = p.independent_rows ? block.first_min / kKeys * kKeys : block.first_min;
  for (int64_t k0 = begin; k0 <= block.last_max; k0 += kKeys) {
    const int64_t k1 = std::min(k0 + kKeys, block.last_max + 1);
    operands.load_keys(kv_head, k0, k1 - k0, p.v);
    const int64_t width = block.strip_width(k0, k1, Operands::kStrip);
    for (int64_t lane = 0; lane < block.lanes; lane += width) {
      const auto strip = block.strip(lane, width, k0, k1, unit);
      const int64_t keys = strip.keys();
      if (keys <= 0) continue;
      const Span span{lane, strip.width, strip.begin - k0, keys};
      operands.scores(s, span);
      if (z0 && k0 <= block.first_max)
        for (int64_t i = lane; i < std::min(lane + strip.width, count); ++i)
          if (const int64_t j = block.first[i] - strip.begin; j >= 0 && j < keys)
            z0[block.statistic(i, p.tq)] =
                p.softpick ? log_pick(s[j * kLaneStride + i]) : s[j * kLaneStride + i];
      if (strip.cut) block.mask(s, lane, strip.width, strip.begin, keys, p.softpick);
      if (p.softpick)
        softpick_step(s + lane, keys, strip.width, m + lane, l + lane, alpha + lane);
      else
        softmax_step(s + lane, keys, strip.width, m + lane, l + lane, alpha + lane);
      operands.add_values(o_t, s, alpha, span);
    }
  }
  if (p.softpick)
    for (int64_t i = 0; i < block.lanes; ++i) l[i] += static_cast<A>(kSoftpickEps) * std::exp(-m[i]);
  for (int64_t i = 0; i < count; ++i)
    lse[block.statistic(i, p.tq)] = m[i] + std::log(l[i]);  // softmax: l >= 1, so lse >= z0
  for (int64_t i = 0; i < block.lanes; ++i) l[i] = A(1) / l[i];
  T* o_rows[kLanes];
  block.pointers(o_rows, o, p);
  unpack_transposed(o_rows, o_t, l, count, p.depth);
}

template <class Operands, class T>
void forward_of(Context& ctx, const AttentionState& out, const Problem<T>& p) {
  using A = accumulate_t<T>;
  const int64_t threads = num_threads(), work_size = forward_workspace<Operands>(p);
  ScratchScope temporaries(ctx.scratch);
  A* const work =
      temporaries.alloc("attention blocks", dtype_of<A>::value, {threads, work_size}).template as<A>();
  if (ctx.dry_run) return;
  p.check_first_keys("attention_forward");

  T* const o = out.o.as<T>();
  A* const lse = out.lse.as<A>();
  A* const z0 = out.z0.empty() ? nullptr : out.z0.as<A>();
  const int64_t rows = p.tq * p.group(), blocks = (rows + kLanes - 1) / kLanes, tasks = blocks * p.kv_heads;
  // Late rows attend to most keys, so they are processed first, which balances the threads.
#pragma omp parallel num_threads(static_cast <int>(std::min(useful_threads(p.pairs(), p.depth), tasks)))
  {
    Operands::begin();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t row = (blocks - 1 - task / p.kv_heads) * kLanes;
      forward_block<Operands>(p, task % p.kv_heads, row, std::min(kLanes, rows - row),
                              work + omp_get_thread_num() * work_size, o, lse, z0);
    }
    Operands::end();
  }
}

template <class T>
void forward_t(Context& ctx, const AttentionState& out, const AttentionInputs& in) {
  Problem<T> p(in);
  if (decodes(p)) return decode_t(ctx, out, p);
  p.independent_rows = ctx.independent_rows;
  with_operands(p, [&](auto operands, const Problem<T>& padded) {
    forward_of<typename decltype(operands)::type>(ctx, out, padded);
  });
}

// ---- backward ----

template <class Operands, class T>
void backward_of(Context& ctx, const AttentionGrads& grads, const Tensor& d_o, const Problem<T>& p,
                 const AttentionState& state, const ScoreGrads& of_scores) {
  using A = accumulate_t<T>;
  const int64_t threads = num_threads(), work_size = Backward<Operands>::workspace(p);
  const bool in_place = Operands::kSumsInPlace && p.padded_depth == p.depth;
  ScratchScope temporaries(ctx.scratch);
  constexpr DType kSum = dtype_of<A>::value;
  A* const delta = temporaries.alloc("attention delta", kSum, {p.heads, p.tq}).template as<A>();
  A* const work = temporaries.alloc("attention blocks", kSum, {threads, work_size}).template as<A>();
  int32_t* const cuts =
      temporaries.alloc("attention chunks", DType::i32, {p.tk / kMinChunk + 2}).template as<int32_t>();
  double* const load_of = temporaries.alloc("attention loads", DType::f64, {threads}).template as<double>();
  const int64_t sums = in_place ? 0 : p.kv_heads * p.tk * p.padded_depth;
  A* const dk_sum = temporaries.alloc("attention dk", kSum, {sums}).template as<A>();
  A* const dv_sum = temporaries.alloc("attention dv", kSum, {sums}).template as<A>();
  if (ctx.dry_run) return;
  p.check_first_keys("attention_backward");

  Backward<Operands> b{p,
                       d_o.as<T>(),
                       state.lse.as<A>(),
                       delta,
                       of_scores.coef0.empty() ? nullptr : of_scores.coef0.as<A>(),
                       grads.dq.as<T>(),
                       grads.dk.as<T>(),
                       grads.dv.as_rows<T>(),
                       grads.dv.stride(),
                       dk_sum,
                       dv_sum,
                       p.tk * p.padded_depth,
                       p.padded_depth,
                       p.padded_depth};
  if constexpr (Operands::kSumsInPlace)
    if (in_place) {
      b.dk_sum = b.dk, b.dv_sum = b.dv, b.sum_head = p.depth;
      b.dk_sum_row = p.kv_heads * p.depth, b.dv_sum_row = b.dv_row;
    }

  const T *o_in = state.o.as<T>(), *d_o_in = d_o.as<T>();
  const A* const dlse_in = of_scores.dlse.empty() ? nullptr : of_scores.dlse.as<A>();
  parallel_for(p.tq, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < p.heads; ++h) {
        const int64_t at = (t * p.heads + h) * p.depth, i = h * p.tq + t;
        delta[i] = dot_row<T, A>(d_o_in + at, o_in + at, p.depth) - (dlse_in ? dlse_in[i] : A(0));
      }
  });

  const int64_t chunks = cut_chunks(cuts, p), team = useful_threads(2 * p.pairs(), p.depth);
  if (chunks_suffice(load_of, team, cuts, chunks, p)) {
    const int64_t tasks = chunks * p.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast <int>(std::min(team, tasks)))
    for (int64_t task = 0; task < tasks; ++task) {
      typename Backward<Operands>::Work w(work + omp_get_thread_num() * work_size, p);
      b.one_pass(w, task % p.kv_heads, chunk_of(cuts, task / p.kv_heads, p));
    }
    return;
  }
#pragma omp parallel num_threads(static_cast <int>(team))
  {
    typename Backward<Operands>::Work w(work + omp_get_thread_num() * work_size, p);
    for (int64_t i = 0; i < chunks; ++i) {
      const Chunk c = chunk_of(cuts, i, p);
      const int64_t row_blocks = b.row_blocks(c), key_blocks = (c.key_end - c.key + kKeys - 1) / kKeys;
      // Heavy ones first: early keys, late rows.
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t task = 0; task < key_blocks * p.kv_heads; ++task)
        b.key_pass(w, task % p.kv_heads, c, task / p.kv_heads);
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t task = 0; task < row_blocks * p.kv_heads; ++task)
        b.row_pass(w, task % p.kv_heads, c, row_blocks - 1 - task / p.kv_heads, false);
    }
  }
}

template <class T>
void backward_t(Context& ctx, const AttentionGrads& grads, const Tensor& d_o, const AttentionInputs& in,
                const AttentionState& state, const ScoreGrads& of_scores) {
  const Problem<T> p(in);
  with_operands(p, [&](auto operands, const Problem<T>& padded) {
    backward_of<typename decltype(operands)::type>(ctx, grads, d_o, padded, state, of_scores);
  });
}

// ---- sink ----

template <class T>
void sink_forward_t(Tensor y, const Tensor& o, const Tensor& lse, const Tensor& sink) {
  using A = accumulate_t<T>;
  const int64_t tokens = o.dim(0), heads = o.dim(1), depth = o.dim(2);
  T* const out = y.as<T>();
  const T *in = o.as<T>(), *s = sink.as<T>();
  const A* const l = lse.as<A>();
  parallel_for(tokens, 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const A gate = sigmoid(l[h * tokens + t] - load(s + h));
        const int64_t at = (t * heads + h) * depth;
#pragma GCC ivdep
        for (int64_t d = 0; d < depth; ++d) store(out + at + d, load(in + at + d) * gate);
      }
  });
}

template <class T>
void sink_backward_t(Tensor d_o, Tensor dlse, Tensor dsink, const Tensor& dy, const Tensor& o,
                     const Tensor& lse, const Tensor& sink) {
  using A = accumulate_t<T>;
  const int64_t tokens = o.dim(0), heads = o.dim(1), depth = o.dim(2);
  T* const out = d_o.as<T>();
  const T *dy_in = dy.as<T>(), *o_in = o.as<T>(), *s = sink.as<T>();
  const A* const l = lse.as<A>();
  A *const dl = dlse.as<A>(), *const ds = dsink.as<A>();
  parallel_for(tokens, 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = (t * heads + h) * depth, i = h * tokens + t;
        const A gate = sigmoid(l[i] - load(s + h)), rest = sigmoid(load(s + h) - l[i]);
        dl[i] = gate * rest * dot_row<T, A>(dy_in + at, o_in + at, depth);
#pragma GCC ivdep
        for (int64_t d = 0; d < depth; ++d) store(out + at + d, load(dy_in + at + d) * gate);
      }
  });
  parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      double sum = 0;
      for (int64_t t = 0; t < tokens; ++t) sum += static_cast<double>(dl[h * tokens + t]);
      ds[h] -= static_cast<A>(sum);
    }
  });
}

}  // namespace

void attention_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                       AttentionKernel /*kernel*/) {
  with_storage_type(in.q.dtype, [&](auto t) { forward_t<decltype(t)>(ctx, out, in); });
}

void attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o,
                        const AttentionInputs& in, const AttentionState& state, const ScoreGrads& of_scores,
                        AttentionKernel /*kernel*/) {
  with_storage_type(in.q.dtype,
                    [&](auto t) { backward_t<decltype(t)>(ctx, grads, d_o, in, state, of_scores); });
}

void sink_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const Tensor& sink) {
  if (ctx.dry_run) return;
  with_storage_type(o.dtype, [&](auto t) { sink_forward_t<decltype(t)>(y, o, lse, sink); });
}

void sink_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dsink, const Tensor& dy, const Tensor& o,
                   const Tensor& lse, const Tensor& sink) {
  if (ctx.dry_run) return;
  with_storage_type(o.dtype,
                    [&](auto t) { sink_backward_t<decltype(t)>(d_o, dlse, dsink, dy, o, lse, sink); });
}

#include "ops/cpu/isa_end.h"
