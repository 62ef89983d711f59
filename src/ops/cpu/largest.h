// The exact choice of the k largest of many scores, of equal ones the last. Include between isa_begin.h and
// isa_end.h, after vectors.h; with immintrin.h on x86.
//
// A sample gives a bound that somewhat more than k scores are likely to reach. Those that reach it are
// written side by side, and the choice is made among them; only if they are too few is it made among all.

namespace {

constexpr int64_t kBins = 256, kSample = 128;

/// Memory for the choice among n scores: every array holds n + 16.
template <class A>
struct ChoiceWork {
  A* scores;        // those that reach the bound, in their order
  int32_t* places;  // and their positions
  A* undecided;
  int32_t* bins;
};

template <class A>
bool has_nan(const A* x, int64_t n) {
  constexpr int W = Simd<A>::kWidth;
  typename Simd<A>::Mask nan{};
  int64_t i = 0;
  for (; i + W <= n; i += W) nan |= load_vec(x + i) != load_vec(x + i);
  bool found = false;
  for (int lane = 0; lane < W; ++lane) found |= nan[lane] != 0;
  for (; i < n; ++i) found |= x[i] != x[i];
  return found;
}

/// A score that, by the look of every (n / kSample)-th, k of x[0, n) very likely reach, three standard
/// deviations of the sample's count above k being allowed for.
template <class A>
A likely_bound(const A* x, int64_t n, int64_t k) {
  const int64_t stride = n / kSample;
  const double share = static_cast<double>(k) / static_cast<double>(n), expected = kSample * share,
               rank = expected + 3 * std::sqrt(expected * (1 - share)) + 1;
  if (stride == 0 || rank >= kSample) return -std::numeric_limits<A>::infinity();
  A sample[kSample];
  for (int64_t i = 0; i < kSample; ++i) sample[i] = x[i * stride];
  A* const bound = sample + static_cast<int64_t>(rank);
  std::nth_element(sample, bound, sample + kSample, std::greater<A>());
  return *bound;
}

/// Copies the scores of x[0, n) that reach the bound, and their positions; returns their number.
template <class A>
int64_t take_from(A bound, const A* x, int64_t n, const ChoiceWork<A>& w) {
  int64_t taken = 0, i = 0;
#if defined(SLUICE_ISA_avx512)
  if constexpr (std::is_same_v<A, float>) {
    const __m512 least = _mm512_set1_ps(bound);
    __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + 16 <= n; i += 16) {
      const __m512 y = _mm512_loadu_ps(x + i);
      const __mmask16 reach = _mm512_cmp_ps_mask(y, least, _CMP_GE_OQ);
      _mm512_storeu_ps(w.scores + taken, _mm512_maskz_compress_ps(reach, y));
      _mm512_storeu_si512(w.places + taken, _mm512_maskz_compress_epi32(reach, place));
      taken += std::popcount(static_cast<unsigned>(reach));
      place = _mm512_add_epi32(place, _mm512_set1_epi32(16));
    }
  }
#endif
  for (; i < n; ++i) {
    w.scores[taken] = x[i];
    w.places[taken] = static_cast<int32_t>(i);
    taken += x[i] >= bound;
  }
  return taken;
}

/// The k-th largest of x[0, n), where none is NaN, and in `above` how many are larger: a histogram over
/// [lowest, highest] finds its bin, and the choice within the bin is small.
template <class A>
A kth_largest(const A* x, int64_t n, int64_t k, const ChoiceWork<A>& w, int64_t& above) {
  constexpr int W = Simd<A>::kWidth;
  Vec<A> low = splat(x[0]), high = low;
  for (int64_t i = 0; i + W <= n; i += W) {
    const Vec<A> y = load_vec(x + i);
    low = y < low ? y : low;
    high = y > high ? y : high;
  }
  A lowest = x[0], highest = x[0];
  for (int i = 0; i < W; ++i) lowest = std::min(lowest, low[i]), highest = std::max(highest, high[i]);
  for (int64_t i = n / W * W; i < n; ++i) lowest = std::min(lowest, x[i]), highest = std::max(highest, x[i]);
  const A scale = static_cast<A>(kBins - 1) / (highest - lowest);
  int64_t in_bin = 0;
  above = 0;
  if (n > 128 && scale > 0 && scale < std::numeric_limits<A>::max()) {
    // Rounding is monotone: a larger score is never in a lower bin.
    for (int64_t i = 0; i < n; ++i) w.bins[i] = static_cast<int32_t>((x[i] - lowest) * scale);
    int32_t histogram[kBins] = {};
    for (int64_t i = 0; i < n; ++i) ++histogram[w.bins[i]];
    int64_t bin = kBins - 1;
    while (above + histogram[bin] < k) above += histogram[bin--];
    for (int64_t i = 0; i < n; ++i) {
      w.undecided[in_bin] = x[i];
      in_bin += w.bins[i] == bin;
    }
  } else {
    in_bin = n;
    std::copy_n(x, n, w.undecided);
  }
  A* const kth = w.undecided + (k - above - 1);
  std::nth_element(w.undecided, kth, w.undecided + in_bin, std::greater<A>());
  above += std::count_if(w.undecided, kth, [&](A y) { return y > *kth; });
  return *kth;
}

/// Writes the positions of the k largest of x[0, n), ascending, where 0 < k < n and none is NaN, and of equal
/// ones the last; out has room for k.
template <class A>
void largest(int32_t* out, const A* x, int64_t n, int64_t k, const ChoiceWork<A>& w) {
  int64_t taken = take_from(likely_bound(x, n, k), x, n, w);
  if (taken < k) taken = take_from(-std::numeric_limits<A>::infinity(), x, n, w);
  int64_t above = 0;
  const A threshold = kth_largest(w.scores, taken, k, w, above);
  const int64_t equal = std::count(w.scores, w.scores + taken, threshold);
  int64_t skip = equal - (k - above), written = 0;  // of the equal ones, the first
  for (int64_t i = 0; i < taken; ++i) {
    const bool same = w.scores[i] == threshold;
    w.bins[written] = w.places[i];
    written += (w.scores[i] > threshold) | (same & (skip <= 0));
    skip -= same;
  }
  std::copy_n(w.bins, k, out);
}

}  // namespace
