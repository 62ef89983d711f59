// Memory-bound. A row is processed by 8 to 256 lanes of a block of 256 threads, with as few 16-byte vectors
// per lane as possible (kRowShapes), and is kept in registers between its two uses. Rows that do not consist
// of 16-byte vectors, or have more than 2048 of them, are processed by plain loops that read twice (the
// second time from cache). Not yet run on a GPU.
#include "common/rows.cuh"
#include "ops/rmsnorm.h"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 256;

template <class T>
struct Forward {
  T *y, *sum;  // sum null: no addition, b is not read
  float* rstd;
  const T *x, *b, *weight;
  int64_t rows, width, groups;
  Divider per_token;  // by groups
  float eps;
};

template <class T, int kLanes, int kV, bool kAdd>
__global__ void __launch_bounds__(kBlock) rmsnorm_kernel(Forward<T> f) {
  constexpr int kN = kVecWidth<T>, kRows = kBlock / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, vectors = static_cast<int>(f.width) / kN;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + static_cast<int>(threadIdx.x) / kLanes;
  const int mine = row < f.rows ? vectors : 0;  // every thread stays for the sum over its group
  const int64_t at = row * f.width;
  Vec<T, kN> x[kV] = {}, b[kAdd ? kV : 1] = {};
#pragma unroll
  for (int v = 0; v < kV; ++v) {
    const int i = v * kLanes + lane;
    if (i < mine) {
      x[v] = load_vec<kN>(f.x + at + i * kN);
      if constexpr (kAdd) b[v] = load_vec<kN>(f.b + at + i * kN);
    }
  }
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kV; ++v) {
    const int i = v * kLanes + lane;
    if (i < mine) {
      float xs[kN];
      to_floats(xs, x[v]);
      if constexpr (kAdd) {
        float bs[kN];
        to_floats(bs, b[v]);
#pragma unroll
        for (int e = 0; e < kN; ++e) xs[e] += bs[e];
        x[v] = from_floats<T>(xs);
        store_vec<kN>(f.sum + at + i * kN, x[v]);
        to_floats(xs, x[v]);
      }
#pragma unroll
      for (int e = 0; e < kN; ++e) squares += xs[e] * xs[e];
    }
  }
  GroupSum<kBlock, kLanes> group_sum;
  const float r = rsqrtf(group_sum(squares) / static_cast<float>(f.width) + f.eps);
  if (mine > 0 && lane == 0) f.rstd[row] = r;
  const int64_t weight_at = (row - f.per_token.quotient(row) * f.groups) * f.width;
#pragma unroll
  for (int v = 0; v < kV; ++v) {
    const int i = v * kLanes + lane;
    if (i < mine) {
      float w[kN], xs[kN];
      to_floats(w, load_weight<kN>(f.weight, weight_at + i * kN));
      to_floats(xs, x[v]);
#pragma unroll
      for (int e = 0; e < kN; ++e) xs[e] = w[e] * (xs[e] * r);
      store_vec<kN>(f.y + at + i * kN, from_floats<T>(xs));
    }
  }
}

/// Any row, one block each.
template <class T>
__global__ void __launch_bounds__(kBlock) rmsnorm_any_kernel(Forward<T> f) {
  const int64_t row = blockIdx.x, at = row * f.width;
  const T* const x = f.sum ? f.sum : f.x;  // what a thread reads of the sum, it has written
  float squares = 0;
  for (int64_t i = threadIdx.x; i < f.width; i += kBlock) {
    if (f.sum) f.sum[at + i] = from_float<T>(to_float(f.x[at + i]) + to_float(f.b[at + i]));
    squares += to_float(x[at + i]) * to_float(x[at + i]);
  }
  const float r = rsqrtf(block_sum<kBlock>(squares) / static_cast<float>(f.width) + f.eps);
  if (threadIdx.x == 0) f.rstd[row] = r;
  const int64_t weight_at = (row - f.per_token.quotient(row) * f.groups) * f.width;
  for (int64_t i = threadIdx.x; i < f.width; i += kBlock)
    f.y[at + i] =
        from_float<T>(to_float(load_weight<1>(f.weight, weight_at + i).v[0]) * (to_float(x[at + i]) * r));
}

/// Number of rows of a weight; one without a weight.
int64_t weight_rows(const Tensor& weight, int64_t width) { return weight ? weight.numel() / width : 1; }

/// How a row of `vectors` vectors of 16 bytes is taken: lanes, and vectors of a lane.
struct RowShape {
  int lanes, per_lane;
};
constexpr RowShape kRowShapes[] = {{8, 1},   {16, 1},  {32, 1},  {32, 2}, {64, 2},
                                   {128, 2}, {256, 2}, {256, 4}, {256, 8}};
constexpr int kRowShapeCount = 9, kMaxVectors = 2048;

inline int row_shape_index(int64_t vectors) {
  int i = 0;
  while (i + 1 < kRowShapeCount && kRowShapes[i].lanes * kRowShapes[i].per_lane < vectors) ++i;
  return i;
}

/// body(lanes, vectors of a lane), both as std::integral_constant.
template <class Body, int kIndex = 0>
void with_row_shape(int index, Body&& body) {
  if constexpr (kIndex < kRowShapeCount) {
    if (index == kIndex)
      body(std::integral_constant<int, kRowShapes[kIndex].lanes>(),
           std::integral_constant<int, kRowShapes[kIndex].per_lane>());
    else
      with_row_shape<Body, kIndex + 1>(index, std::forward<Body>(body));
  }
}

template <class T>
void forward(Context& ctx, const char* name, const Forward<T>& f) {
  if (f.rows == 0) return;
  constexpr int kN = kVecWidth<T>;
  if (f.width % kN != 0 || f.width / kN > kMaxVectors || !aligned(f.y, f.sum, f.x, f.b, f.weight)) {
    launch(ctx, name, {.grid = dim3(static_cast<unsigned>(f.rows)), .block = dim3(kBlock)},
           rmsnorm_any_kernel<T>, f);
    return;
  }
  with_row_shape(row_shape_index(f.width / kN), [&](auto lanes, auto per_lane) {
    constexpr int kLanes = lanes(), kV = per_lane();
    const LaunchConfig config = {.grid = dim3(blocks_for(f.rows, kBlock / kLanes)), .block = dim3(kBlock)};
    if (f.sum)
      launch(ctx, name, config, rmsnorm_kernel<T, kLanes, kV, true>, f);
    else
      launch(ctx, name, config, rmsnorm_kernel<T, kLanes, kV, false>, f);
  });
}

constexpr int kPrefetched = 3;  // by backward, for each vector of a row: x, dy, dx

template <class T>
struct Backward {
  T* dx;
  float* partials;  // (chunks, groups, width); null, as weight: ones
  const T *dy, *x, *weight;
  const float* rstd;
  int64_t width;
  int64_t tokens;  // rows of x for each row of the weight
  int groups, chunks;
  bool add;  // to dx
};

/// Persistent: block (chunk, g) goes over the rows of weight row g, a stride apart, and keeps dw of its
/// columns in registers. Row t of weight row g is row t G + g of x. The next row is on its way while the sum
/// of this one is found and its gradient is written.
template <class T, int kLanes, int kV>
__global__ void __launch_bounds__(kBlock, kV == 1   ? 4
                                          : kV == 2 ? 3
                                          : kV == 4 ? 2
                                                    : 1) rmsnorm_backward_kernel(Backward<T> b) {
  constexpr int kN = kVecWidth<T>, kRows = kBlock / kLanes, kStep = kLanes * kN;
  DYN_SMEM(char, smem, 16);
  Prefetch<kBlock, kPrefetched * kV> next(smem);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, column = lane * kN,
            width = static_cast<int>(b.width);
  const int group = static_cast<int>(blockIdx.x) % b.groups, chunk = static_cast<int>(blockIdx.x) / b.groups;
  const int64_t weight_at = group * b.width + column;
  const int64_t stride = static_cast<int64_t>(b.chunks) * kRows;
  int64_t t = static_cast<int64_t>(chunk) * kRows + static_cast<int>(threadIdx.x) / kLanes;
  float next_r = 0;
  const auto ask = [&](int64_t t) {
    if (t < b.tokens) {
      const int64_t row = t * b.groups + group, at = row * b.width + column;
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        if (column + v * kStep < width) {
          next.ask(v, b.x + at + v * kStep);
          next.ask(kV + v, b.dy + at + v * kStep);
        }
      }
      next_r = b.rstd[row];
    }
    next.commit();
  };
  const auto ask_dx = [&](int64_t t) {
    if (b.add && t < b.tokens) {
      const int64_t at = (t * b.groups + group) * b.width + column;
#pragma unroll
      for (int v = 0; v < kV; ++v)
        if (column + v * kStep < width) next.ask(2 * kV + v, b.dx + at + v * kStep);
    }
    next.commit();
  };
  ask(t);
  ask_dx(t);
  GroupSum<kBlock, kLanes> group_sum;
  float dw[kV][kN] = {};
  for (int64_t first = static_cast<int64_t>(chunk) * kRows; first < b.tokens; first += stride, t += stride) {
    const int mine = t < b.tokens ? width : 0;  // every thread stays for the sums
    const int64_t at = (t * b.groups + group) * b.width + column;
    Vec<T, kN> x[kV], dy[kV];  // what was not asked for is read, too, and not used
    next.wait_but_last();
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      x[v] = next.template read<T>(v);
      dy[v] = next.template read<T>(kV + v);
    }
    const float r = next_r;
    ask(t + stride);
    float gx = 0;
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      if (column + v * kStep < mine) {
        float w[kN], xs[kN], ds[kN];
        to_floats(w, load_weight<kN>(b.weight, weight_at + v * kStep));
        to_floats(xs, x[v]), to_floats(ds, dy[v]);
#pragma unroll
        for (int e = 0; e < kN; ++e) gx += ds[e] * xs[e] * w[e];
      }
    }
    const float c = r * r * (group_sum(gx) / static_cast<float>(width));
    next.wait_but_last();
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      if (column + v * kStep < mine) {
        float w[kN], xs[kN], ds[kN];
        to_floats(w, load_weight<kN>(b.weight, weight_at + v * kStep));
        to_floats(xs, x[v]), to_floats(ds, dy[v]);
#pragma unroll
        for (int e = 0; e < kN; ++e) {
          dw[v][e] += ds[e] * xs[e] * r;
          ds[e] = ds[e] * w[e] - xs[e] * c;
        }
        if (b.add) {
          float old[kN];
          to_floats(old, next.template read<T>(2 * kV + v));
#pragma unroll
          for (int e = 0; e < kN; ++e) ds[e] = old[e] + r * ds[e];
        } else {
#pragma unroll
          for (int e = 0; e < kN; ++e) ds[e] = r * ds[e];
        }
        store_vec<kN>(b.dx + at + v * kStep, from_floats<T>(ds));
      }
    }
    ask_dx(t + stride);
  }
  if (b.partials)  // of the whole launch, or none of it
    store_columns<kBlock, kLanes>(b.partials + blockIdx.x * b.width, dw, kStep, width);
}

/// Any row: a block goes over its rows one by one, and keeps dw in the partials themselves.
template <class T>
__global__ void __launch_bounds__(kBlock) rmsnorm_backward_any_kernel(Backward<T> b) {
  const int group = static_cast<int>(blockIdx.x) % b.groups, chunk = static_cast<int>(blockIdx.x) / b.groups;
  const auto weight = [&](int64_t i) { return to_float(load_weight<1>(b.weight, group * b.width + i).v[0]); };
  float* const dw = b.partials ? b.partials + blockIdx.x * b.width : nullptr;
  for (int64_t i = threadIdx.x; dw && i < b.width; i += kBlock) dw[i] = 0;
  for (int64_t t = chunk; t < b.tokens; t += b.chunks) {
    const int64_t row = t * b.groups + group, at = row * b.width;
    const float r = b.rstd[row];
    float gx = 0;
    for (int64_t i = threadIdx.x; i < b.width; i += kBlock) {
      const float dyx = to_float(b.dy[at + i]) * to_float(b.x[at + i]);
      gx += dyx * weight(i);
      if (dw) dw[i] += dyx * r;
    }
    const float c = r * r * (block_sum<kBlock>(gx) / static_cast<float>(b.width));
    for (int64_t i = threadIdx.x; i < b.width; i += kBlock) {
      const float d = r * (to_float(b.dy[at + i]) * weight(i) - to_float(b.x[at + i]) * c);
      b.dx[at + i] = from_float<T>(b.add ? to_float(b.dx[at + i]) + d : d);
    }
  }
}

/// Number of blocks that divide the rows of one weight row: enough to saturate the memory of a large GPU (132
/// SMs) with about 48 KiB in flight each, and at least two rounds per block. It depends only on shapes, so
/// that sums are equal on every GPU.
int64_t chunks_of(int64_t tokens, int64_t groups, const RowShape& shape) {
  const int64_t at_once = 2 * (kBlock / shape.lanes), most = (shape.per_lane == 1   ? 528
                                                              : shape.per_lane == 2 ? 396
                                                                                    : 264);
  return std::max<int64_t>(std::min((tokens + at_once - 1) / at_once, most / groups), 1);
}

}  // namespace

void rmsnorm_forward(Context& ctx, Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps) {
  if (ctx.dry_run) return;
  dispatch_storage("rmsnorm_forward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int64_t width = x.dim(-1), groups = weight_rows(weight, width);
    forward<T>(
        ctx, "rmsnorm_forward",
        {device_data<T>(y), nullptr, device_data<float>(rstd), device_data<T>(x), nullptr,
         device_data<T>(weight), x.numel() / width, width, groups, Divider(groups), static_cast<float>(eps)});
  });
}

void add_rmsnorm_forward(Context& ctx, Tensor sum, Tensor y, Tensor rstd, const Tensor& a, const Tensor& b,
                         const Tensor& weight, double eps) {
  if (ctx.dry_run) return;
  dispatch_storage("add_rmsnorm_forward", a, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int64_t width = a.dim(-1), groups = weight_rows(weight, width);
    forward<T>(ctx, "add_rmsnorm_forward",
               {device_data<T>(y), device_data<T>(sum), device_data<float>(rstd), device_data<T>(a),
                device_data<T>(b), device_data<T>(weight), a.numel() / width, width, groups, Divider(groups),
                static_cast<float>(eps)});
  });
}

void rmsnorm_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dy, const Tensor& x,
                      const Tensor& weight, const Tensor& rstd, Into into) {
  const int64_t width = x.dim(-1), groups = weight_rows(weight, width), tokens = x.numel() / width / groups;
  const int64_t per_vector = 16 / dtype_size(x.dtype), vectors = (width + per_vector - 1) / per_vector;
  const int shape = row_shape_index(vectors);
  const int64_t chunks = chunks_of(tokens, groups, kRowShapes[shape]);
  ScratchScope scratch(ctx.scratch);
  const Tensor partials =
      weight ? scratch.alloc("rmsnorm_dweight", DType::f32, {chunks, groups * width}) : Tensor();
  if (ctx.dry_run || tokens == 0) return;
  dispatch_storage("rmsnorm_backward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const Backward<T> b = {device_data<T>(dx),
                           device_data<float>(partials),
                           device_data<T>(dy),
                           device_data<T>(x),
                           device_data<T>(weight),
                           device_data<float>(rstd),
                           width,
                           tokens,
                           static_cast<int>(groups),
                           static_cast<int>(chunks),
                           into == Into::add};
    const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(chunks * groups)), .block = dim3(kBlock)};
    if (width % per_vector != 0 || vectors > kMaxVectors || !aligned(b.dx, b.dy, b.x, b.weight)) {
      launch(ctx, "rmsnorm_backward", config, rmsnorm_backward_any_kernel<T>, b);
    } else {
      with_row_shape(shape, [&](auto lanes, auto per_lane) {
        LaunchConfig with_next = config;
        with_next.smem = Prefetch<kBlock, kPrefetched * per_lane()>::kBytes;
        launch(ctx, "rmsnorm_backward", with_next, rmsnorm_backward_kernel<T, lanes(), per_lane()>, b);
      });
    }
    if (weight)
      column_sums(ctx, "rmsnorm_backward dweight", device_data<float>(dweight), b.partials, chunks,
                  groups * width, Into::add);
  });
}

}  // namespace sluice::cuda
