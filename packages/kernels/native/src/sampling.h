// Choosing tokens from logits, and describing them, without sorting the vocabulary.
//
// One task is one row: after the first pass, which memory bounds, the row lies in the second-level
// cache. The first pass notes the largest value of every *lane* of every chunk of 16 vectors. Of n
// values, no more than the k-th largest lane maximum is a lower bound of the k-th largest value, and
// a close one, so top_k collects little more than k candidates and looks only where they are.
//
// top_p needs one pass over the weights e^(y - max). A sample of the row (every 32nd vector) says
// beforehand between which values the cut will lie, so that this pass can both sum what is above and
// collect what is between; the cut is then found among the collected, exactly. Where the sample was
// wrong, the pass is repeated on the other side.
//
// Order of a row's operations depends on the row alone. Sums of weights are float64, in token order
// between chunks and in a fixed tree inside. Letters: V vocabulary, y = logit * (1 / temperature).

namespace headrace::HR_ISA {
namespace {

constexpr int CHUNK = 16 * W;
constexpr float INF = __builtin_inff();
constexpr float WEIGHTLESS = 79.8973f;  // e^-that is 2e-35: float64 cannot hold it beside the largest, 1
constexpr int64_t SAMPLE_EVERY = 32;
constexpr int64_t CERTAIN = 1024;  // how many of the likeliest are not sampled but known

// --- primitives ---------------------------------------------------------------------------------

// Bit i: a[i] >= b[i].
#if defined(HR_AVX512)
inline uint32_t at_least(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
// Appends the lanes of `mask` and their ids, first + lane, and returns how many.
inline int64_t append(vf y, uint32_t mask, int32_t first, float* ys, int32_t* ids) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i id = _mm512_add_epi32(_mm512_set1_epi32(first), lanes);
  // Compressed in a register: compressing stores are microcode on some machines.
  _mm512_storeu_ps(ys, _mm512_maskz_compress_ps(__mmask16(mask), y));
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(__mmask16(mask), id));
  return __builtin_popcount(mask);
}
// Running sums of float32 values in float64.
struct Sum {
  __m512d a = _mm512_setzero_pd(), b = _mm512_setzero_pd();
  void add(vf x) {
    a = _mm512_add_pd(a, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    b = _mm512_add_pd(b, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  double total() const {
    double s[8];
    _mm512_storeu_pd(s, _mm512_add_pd(a, b));
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
};
#else
#if defined(HR_AVX2)
inline uint32_t at_least(vf a, vf b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); }
struct Sum {
  __m256d a = _mm256_setzero_pd(), b = _mm256_setzero_pd();
  void add(vf x) {
    a = _mm256_add_pd(a, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    b = _mm256_add_pd(b, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  double total() const {
    double s[4];
    _mm256_storeu_pd(s, _mm256_add_pd(a, b));
    return (s[0] + s[2]) + (s[1] + s[3]);
  }
};
#else
inline uint32_t at_least(vf a, vf b) {
  const vi m = a >= b;
  return uint32_t((m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8));
}
struct Sum {
  double s[4] = {0, 0, 0, 0};
  void add(vf x) { for (int i = 0; i < 4; ++i) s[i] += double(x[i]); }
  double total() const { return (s[0] + s[2]) + (s[1] + s[3]); }
};
#endif
inline int64_t append(vf y, uint32_t mask, int32_t first, float* ys, int32_t* ids) {
  float lanes[W];
  st(lanes, y);
  int64_t n = 0;
  for (; mask != 0; mask &= mask - 1, ++n) {
    const int i = __builtin_ctz(mask);
    ys[n] = lanes[i];
    ids[n] = first + i;
  }
  return n;
}
#endif

#if defined(HR_AVX512)
inline vf scaled(vf x, vf power) { return _mm512_scalef_ps(x, power); }
#else
inline vf scaled(vf x, vf power) { return vmul(x, vpow2(power)); }
#endif

// e^(y - largest) where y >= least, else 0. least is not below largest - WEIGHTLESS, which spares
// what vexp does for other arguments.
inline vf weight_of(vf y, vf largest, vf least) {
  const vf x = vmax(vsub(y, largest), vset(-80.0f));
  const vf n = vround(vmul(x, vset(1.44269504088896341f)));
  vf r = vfma(n, vset(-0.693359375f), x);
  r = vfma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  const vf e = vadd(vfma(p, vmul(r, r), r), vset(1.0f));
  return vless(y, least, vzero(), scaled(e, n));
}

// Floats in the order of integers; -0 is just below 0.
inline int32_t key_of(float x) {
  const int32_t i = int32_t(float_bits(x));
  return i ^ (i >> 31 & 0x7fffffff);
}
inline float of_key(int32_t k) { return bits_float(uint32_t(k ^ (k >> 31 & 0x7fffffff))); }
inline int32_t middle(int32_t low, int32_t high) { return int32_t((int64_t(low) + high) >> 1); }

// How many of a[0..n) are >= t. n is a multiple of W.
inline int64_t count_at_least(const float* a, int64_t n, float t) {
  const vf limit = vset(t), one = vset(1.0f);
  vf c[4] = {vzero(), vzero(), vzero(), vzero()};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    for (int u = 0; u < 4; ++u) c[u] = vadd(c[u], vless(ld(a + i + u * W), limit, vzero(), one));
  }
  for (; i < n; i += W) c[0] = vadd(c[0], vless(ld(a + i), limit, vzero(), one));
  return int64_t(hsum(vadd(vadd(c[0], c[1]), vadd(c[2], c[3]))));
}

// A value that at least k of a[0..n) reach, and no more than k + slack unless equal ones force it;
// -inf if n < k. No value of a is larger than `largest`. n is a multiple of W, padding is -inf.
float bound_of_largest(const float* a, int64_t n, int64_t k, int64_t slack, float largest) {
  if (k >= n) return -INF;
  int32_t low = key_of(-INF), high = key_of(largest);
  if (high == INT32_MAX) return -INF;
  ++high;
  int64_t found = n;
  // Near the largest is the place to look first.
  for (float step = 1.0f; step < 1e30f; step *= 4) {
    const int64_t count = count_at_least(a, n, largest - step);
    if (count >= k) {
      low = key_of(largest - step);
      found = count;
      break;
    }
    high = key_of(largest - step);
  }
  while (high - int64_t(low) > 1 && found > k + slack) {
    const int32_t key = middle(low, high);
    const int64_t count = count_at_least(a, n, of_key(key));
    if (count >= k) { low = key; found = count; } else { high = key; }
  }
  return of_key(low);
}

// --- a row --------------------------------------------------------------------------------------

// Values with their token ids, in token order, padded to whole vectors with -inf.
struct Candidates {
  float* ys;
  float* weights;
  int32_t* ids;
  float* spare_ys;       // for cut_top_p
  float* spare_weights;
  int32_t* spare_ids;
  int64_t size = 0;

  int64_t padded() const { return round_up(size, W); }
  void pad() {
    for (int64_t i = size; i < padded(); ++i) ys[i] = -INF;
  }
  void weigh(float largest) {
    pad();
    const vf most = vset(largest), least = vset(largest - WEIGHTLESS);
    for (int64_t i = 0; i < padded(); i += W) st(weights + i, weight_of(ld(ys + i), most, least));
  }
  double sum() const {
    Sum s;
    for (int64_t i = 0; i < padded(); i += W) s.add(ld(weights + i));
    return s.total();
  }
};

// Which tokens stay: y > threshold, or y == threshold and id <= last.
struct Cut {
  float threshold = -INF;
  int32_t last = INT32_MAX;
  bool keeps(float y, int32_t id) const { return y > threshold || (y == threshold && id <= last); }
};

// x as it is.
struct Same {
  vf operator()(vf x) const { return x; }
};
struct Scaled {
  vf factor;
  vf operator()(vf x) const { return vmul(x, factor); }
};
struct LogProb {
  vf largest, log_sum;
  vf operator()(vf x) const { return vsub(vsub(x, largest), log_sum); }
};

template <class T> struct Row {
  const T* x;
  int64_t size;
  int64_t chunks;
  float* lane_maxima;  // [chunks, W]
  double* chunk_sums;  // [chunks]
  Candidates found;
  T* tail;  // the last chunk, filled up with -inf
  float largest;
  bool bad;  // NaN or +inf is somewhere

  static size_t scratch_bytes(int64_t size) {
    const size_t values = size_t(round_up(size, CHUNK)) + CHUNK;
    return values / CHUNK * (W * 4 + 8) + 6 * 4 * values + 2 * CHUNK * sizeof(T) + 256;
  }

  Row(const T* x, int64_t size) : x(x), size(size), chunks(ceil_div(size, CHUNK)) {
    const int64_t values = chunks * CHUNK + CHUNK;
    char* at = static_cast<char*>(scratch(SCRATCH_TASK, scratch_bytes(size)));
    lane_maxima = reinterpret_cast<float*>(at), at += (chunks + 1) * W * 4;
    found.ys = reinterpret_cast<float*>(at), at += values * 4;
    found.weights = reinterpret_cast<float*>(at), at += values * 4;
    found.ids = reinterpret_cast<int32_t*>(at), at += values * 4;
    found.spare_ys = reinterpret_cast<float*>(at), at += values * 4;
    found.spare_weights = reinterpret_cast<float*>(at), at += values * 4;
    found.spare_ids = reinterpret_cast<int32_t*>(at), at += values * 4;
    tail = reinterpret_cast<T*>(at), at += CHUNK * sizeof(T);
    chunk_sums = reinterpret_cast<double*>(at);
    const int64_t full = size / CHUNK * CHUNK;
    for (int64_t i = 0; i < CHUNK; ++i) from_float(-INF, tail[i]);
    __builtin_memcpy(tail, x + full, size_t(size - full) * sizeof(T));
  }

  const T* chunk(int64_t c) const { return (c + 1) * CHUNK <= size ? x + c * CHUNK : tail; }

  // Fills in lane_maxima, largest and bad.
  void scan() {
    const vf infinity = vset(INF);
    vf best = vset(-INF), odd = vzero();
    for (int64_t c = 0; c < chunks; ++c) {
      const T* p = chunk(c);
      vf m[2] = {vset(-INF), vset(-INF)};
      for (int j = 0; j < 16; ++j) {
        const vf v = ld(p + j * W);
        m[j & 1] = vmax(v, m[j & 1]);        // skips NaN
        odd = vless(v, infinity, odd, v);    // keeps NaN and infinity
      }
      const vf both = vmax(m[0], m[1]);
      st(lane_maxima + c * W, both);
      best = vmax(both, best);
    }
    largest = hmax(best);
    float lanes[W];
    st(lanes, odd);
    bad = false;
    for (int i = 0; i < W; ++i) bad |= !(lanes[i] == 0.0f);
  }

  // NaN if there is one, else the largest.
  float largest_or_nan() const {
    if (!bad) return largest;
    for (int64_t i = 0; i < size; ++i) {
      const float v = to_float(x[i]);
      if (v != v) return v;
    }
    return largest;
  }

  // The first token that has the largest value.
  int64_t first_largest() const {
    const vf limit = vset(largest);
    for (int64_t c = 0; c < chunks; ++c) {
      if (at_least(ld(lane_maxima + c * W), limit) == 0) continue;
      const T* p = chunk(c);
      for (int j = 0; j < 16; ++j) {
        const uint32_t mask = at_least(ld(p + j * W), limit);
        if (mask != 0) return c * CHUNK + j * W + __builtin_ctz(mask);
      }
    }
    return 0;
  }

  // lane_maxima and largest of f(x); f must not decrease.
  template <class F> void transform(const F& f) {
    for (int64_t c = 0; c < chunks; ++c) st(lane_maxima + c * W, f(ld(lane_maxima + c * W)));
    float lanes[W];
    st(lanes, f(vset(largest)));
    largest = lanes[0];
  }

  // Collects all y = f(x) >= low.
  template <class F> void collect(const F& f, float low) {
    const vf limit = vset(low);
    int64_t n = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      if (at_least(ld(lane_maxima + c * W), limit) == 0) continue;
      const T* p = chunk(c);
      for (int j = 0; j < 16; ++j) {
        const vf y = f(ld(p + j * W));
        const uint32_t mask = at_least(y, limit);
        if (mask != 0) n += append(y, mask, int32_t(c * CHUNK + j * W), found.ys + n, found.ids + n);
      }
    }
    while (n > 0 && found.ids[n - 1] >= size) --n;  // the tail's filling, if low is -inf
    found.size = n;
    found.pad();
  }

  // Adds the weights of what was collected to the sums of their chunks.
  void add_found() {
    for (int64_t i = 0; i < found.size;) {
      const int64_t c = found.ids[i] / CHUNK, end = (c + 1) * CHUNK;
      double sum = 0;
      for (; i < found.size && found.ids[i] < end; ++i) sum += double(found.weights[i]);
      chunk_sums[c] += sum;
    }
  }

  struct Sums { double above, between, below; };

  // Weights of y = f(x) >= floor, which is not above `low`: those above `high` summed by chunk into chunk_sums, those in
  // [low, high] collected, the others summed.
  template <bool all, class F> Sums sum(const F& f, float floor, float low, float high) {
    const vf least = vset(floor), from = vset(low), to = vset(high), most = vset(largest);
    Sums sums = {0, 0, 0};
    int64_t n = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      chunk_sums[c] = 0;
      if (at_least(ld(lane_maxima + c * W), least) == 0) continue;
      const T* p = chunk(c);
      Sum above, below;
      for (int j = 0; j < 16; ++j) {
        const vf y = f(ld(p + j * W));
        const vf w = weight_of(y, most, least);
        if (all) {
          above.add(w);
          continue;
        }
        above.add(vless(to, y, w, vzero()));
        below.add(vless(y, from, w, vzero()));
        const uint32_t mask = at_least(y, from) & at_least(to, y);
        if (mask != 0) n += append(y, mask, int32_t(c * CHUNK + j * W), found.ys + n, found.ids + n);
      }
      chunk_sums[c] = above.total();
      sums.above += chunk_sums[c];
      if (!all) sums.below += below.total();
    }
    while (n > 0 && found.ids[n - 1] >= size) --n;
    found.size = n;
    found.weigh(largest);
    sums.between = found.sum();
    return sums;
  }
};

// --- cuts ---------------------------------------------------------------------------------------

// What the cut does not keep weighs nothing.
inline void drop(Candidates& c, const Cut& cut) {
  const vf t = vset(cut.threshold);
  for (int64_t i = 0; i < c.padded(); i += W) {
    const vf y = ld(c.ys + i);
    st(c.weights + i, vless(y, t, vzero(), ld(c.weights + i)));
    for (uint32_t equal = at_least(y, t) & at_least(t, y); equal != 0; equal &= equal - 1) {
      const int64_t at = i + __builtin_ctz(equal);
      if (at < c.size && c.ids[at] > cut.last) c.weights[at] = 0;
    }
  }
}

// The id of the n-th candidate (from 1) that equals t; the last such if there are fewer.
inline int32_t nth_equal(const Candidates& c, float t, int64_t n) {
  int32_t id = -1;
  for (int64_t i = 0; i < c.size && n > 0; ++i) {
    if (c.ys[i] == t) id = c.ids[i], --n;
  }
  return id;
}

inline Cut cut_top_k(const Candidates& c, int64_t k, float largest) {
  const float t = bound_of_largest(c.ys, c.padded(), k, 0, largest);
  if (c.size <= k || t == -INF) return {};
  int64_t above = 0;
  for (int64_t i = 0; i < c.size; ++i) above += c.ys[i] > t;
  return {t, nth_equal(c, t, k - above)};
}

inline double sum_above(const float* ys, const float* weights, int64_t n, float t) {
  const vf limit = vset(t);
  Sum s;
  for (int64_t i = 0; i < n; i += W) s.add(vless(limit, ld(ys + i), ld(weights + i), vzero()));
  return s.total();
}

// The fewest of the likeliest candidates that together with `above` reach the goal. No candidate is
// smaller than `lowest`, nor larger than `highest`.
inline Cut cut_top_p(const Candidates& c, double above, double goal, float lowest, float highest) {
  // The smallest t such that what is greater than t does not reach the goal lies in (low, high].
  int64_t low = int64_t(key_of(lowest)) - 1, high = key_of(highest);
  const float* ys = c.ys;
  const float* weights = c.weights;
  int64_t n = c.padded();
  double sum = above;  // of what is greater than all of ys
  while (high - low > 1) {
    for (int step = 0; step < 4 && high - low > 1; ++step) {
      const int64_t key = (low + high) >> 1;
      if (sum + sum_above(ys, weights, n, of_key(int32_t(key))) < goal) high = key; else low = key;
    }
    // Go on with what is between.
    const vf from = vset(of_key(int32_t(low + 1))), to = vset(of_key(int32_t(high)));
    sum += sum_above(ys, weights, n, of_key(int32_t(high)));
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i += W) {
      const vf y = ld(ys + i);
      const uint32_t mask = at_least(y, from) & at_least(to, y);
      if (mask == 0) continue;
      const int64_t more = append(y, mask, int32_t(i), c.spare_ys + kept, c.spare_ids + kept);
      for (int64_t k = kept; k < kept + more; ++k) c.spare_weights[k] = weights[c.spare_ids[k]];
      kept += more;
    }
    n = round_up(kept, W);
    for (int64_t k = kept; k < n; ++k) c.spare_ys[k] = -INF, c.spare_weights[k] = 0;
    ys = c.spare_ys;
    weights = c.spare_weights;
  }
  const float t = of_key(int32_t(high));
  sum += sum_above(ys, weights, n, t);
  int32_t last = -1;
  for (int64_t i = 0; i < c.size; ++i) {
    if (c.ys[i] != t || c.weights[i] == 0) continue;
    last = c.ids[i];
    sum += double(c.weights[i]);
    if (sum >= goal) break;
  }
  return {t, last};
}

struct Bracket { float low, high; };

// Between which values top_p will probably cut, from the likeliest values and a sample of the rest.
template <class T, class F>
Bracket guess_top_p(Row<T>& row, const F& f, float floor, double p) {
  const float top = bound_of_largest(row.lane_maxima, row.chunks * W, CERTAIN, CERTAIN / 4, row.largest);
  row.collect(f, top > floor ? top : floor);
  Candidates& c = row.found;
  c.weigh(row.largest);
  const double certain = c.sum();
  if (top <= floor) return {floor, INF};  // that is all there is

  c.size = 0;
  Sum sum;
  const vf least = vset(floor), limit = vset(top), factor = vset(float(SAMPLE_EVERY));
  for (int64_t v = 0; (v + 1) * W <= row.size; v += SAMPLE_EVERY) {
    const vf y = f(ld(row.x + v * W));
    const vf w = vmul(factor, weight_of(y, vset(row.largest), least));
    st(c.ys + c.size, y);
    st(c.weights + c.size, vless(y, limit, w, vzero()));
    sum.add(ld(c.weights + c.size));
    c.size += W;
  }
  const double total = certain + sum.total(), goal = p * total;
  // Around where the sum above reaches `wanted`. Coarse: float32 will do.
  const auto search = [&](double wanted, Bracket b, int steps) {
    for (; steps > 0; --steps) {
      const float t = 0.5f * (b.low + b.high);
      const vf limit = vset(t);
      vf s[2] = {vzero(), vzero()};
      for (int64_t i = 0; i < c.size; i += W) {
        s[i / W & 1] = vadd(s[i / W & 1], vless(limit, ld(c.ys + i), ld(c.weights + i), vzero()));
      }
      if (certain + double(hsum(vadd(s[0], s[1]))) >= wanted) b.low = t; else b.high = t;
    }
    return b;
  };
  const Bracket whole = {floor, top};
  const float cut = goal <= certain ? top : search(goal, whole, 12).low;
  // What is above the cut is too much by (1 - p) of its error, what is below too little by p of its.
  const vf edge = vset(cut), above_share = vset(float(1 - p)), below_share = vset(float(p));
  Sum squares;
  for (int64_t i = 0; i < c.size; i += W) {
    const vf w = vmul(ld(c.weights + i), vless(edge, ld(c.ys + i), above_share, below_share));
    squares.add(vmul(w, w));
  }
  const double margin = 3 * __builtin_sqrt(squares.total());
  Bracket b;
  b.high = goal - margin <= certain ? INF : search(goal - margin, {cut, top}, 9).high;
  b.low = goal + margin <= certain ? top
          : goal + margin >= total ? floor : search(goal + margin, {floor, cut}, 12).low;
  return b;
}

// --- one row's token ----------------------------------------------------------------------------

struct Choice {
  float temperature;
  float min_p;
  int64_t top_k;
  double top_p;
  double uniform;
};

inline double below(double goal, double total) {
  // u * total may round up to total, which no running sum exceeds.
  if (goal < total) return goal;
  uint64_t bits;
  __builtin_memcpy(&bits, &total, 8);
  if (total > 0) --bits;
  __builtin_memcpy(&total, &bits, 8);
  return total;
}

// The first candidate at which the running sum of weights exceeds u times their sum.
inline int64_t draw(const Candidates& c, double uniform) {
  double total = 0, sum = 0;
  for (int64_t i = 0; i < c.size; ++i) total += double(c.weights[i]);
  const double goal = below(uniform * total, total);
  for (int64_t i = 0; i < c.size; ++i) {
    sum += double(c.weights[i]);
    if (sum > goal) return c.ids[i];
  }
  return -1;
}

// The same over the row: chunk_sums holds the sums of what the cut keeps.
template <class T, class F>
int64_t draw(const Row<T>& row, const F& f, const Cut& cut, float floor, double uniform) {
  double total = 0, sum = 0;
  for (int64_t c = 0; c < row.chunks; ++c) total += row.chunk_sums[c];
  const double goal = below(uniform * total, total);
  int64_t c = 0, token = -1;
  for (int64_t i = 0; i < row.chunks; ++i) {
    if (row.chunk_sums[i] == 0) continue;
    c = i;
    if (sum + row.chunk_sums[i] > goal) break;
    sum += row.chunk_sums[i];
  }
  const T* p = row.chunk(c);
  for (int j = 0; j < 16; ++j) {
    float ys[W], weights[W];
    const vf y = f(ld(p + j * W));
    st(ys, y);
    st(weights, weight_of(y, vset(row.largest), vset(floor)));
    for (int i = 0; i < W; ++i) {
      const int32_t id = int32_t(c * CHUNK + j * W + i);
      if (weights[i] == 0 || id >= row.size || !cut.keeps(ys[i], id)) continue;
      token = id;  // the chunk's sum was taken in another order: its last token may close the gap
      sum += double(weights[i]);
      if (sum > goal) return token;
    }
  }
  return token;
}

template <class T, class F>
int64_t choose(Row<T>& row, const F& f, const Choice& choice, Cut& cut) {
  const int64_t first = row.first_largest();
  row.transform(f);
  float floor = -INF;
  if (choice.min_p > 0) {
    floor = row.largest + float(__builtin_log(double(choice.min_p)));
    cut = {floor, INT32_MAX};
  }
  // What has no weight need not be looked at.
  const float weightless = row.largest - WEIGHTLESS, lowest = floor > weightless ? floor : weightless;
  int64_t token;
  if (choice.top_k > 0 && choice.top_k < row.size) {
    const int64_t k = choice.top_k;
    const float bound = bound_of_largest(row.lane_maxima, row.chunks * W, k, k / 8 + 16, row.largest);
    cut = {bound > floor ? bound : floor, INT32_MAX};
    row.collect(f, cut.threshold);
    Candidates& c = row.found;
    c.weigh(row.largest);
    if (c.size > k) {
      cut = cut_top_k(c, k, row.largest);
      drop(c, cut);
    }
    if (choice.top_p < 1) {
      cut = cut_top_p(c, 0, choice.top_p * c.sum(), cut.threshold, row.largest);
      drop(c, cut);
    }
    token = draw(c, choice.uniform);
  } else if (choice.top_p < 1) {
    Bracket b = guess_top_p(row, f, lowest, choice.top_p);
    auto s = row.template sum<false>(f, lowest, b.low, b.high);
    double goal = choice.top_p * (s.above + s.between + s.below);
    if (s.above >= goal) {
      b = {b.high, INF};
      s = row.template sum<false>(f, lowest, b.low, b.high);
    } else if (s.above + s.between < goal && b.low > lowest) {
      b = {lowest, b.low};
      s = row.template sum<false>(f, lowest, b.low, b.high);
    }
    goal = choice.top_p * (s.above + s.between + s.below);
    Candidates& c = row.found;
    cut = cut_top_p(c, s.above, goal, b.low, b.high < row.largest ? b.high : row.largest);
    drop(c, cut);
    if (s.above == 0) {
      token = draw(c, choice.uniform);
    } else {
      row.add_found();
      token = draw(row, f, cut, lowest, choice.uniform);
    }
  } else {
    row.template sum<true>(f, lowest, INF, -INF);
    token = draw(row, f, cut, lowest, choice.uniform);
  }
  return token < 0 ? first : token;
}

// x = f(x) where the cut keeps it, else -inf.
template <class F> void write_filtered(float* x, int64_t size, const F& f, const Cut& cut) {
  for (int64_t i = 0; i < size; i += W) {
    float ys[W];
    st(ys, f(ld_upto(x + i, size - i)));
    for (int j = 0; j < W && i + j < size; ++j) x[i + j] = cut.keeps(ys[j], int32_t(i + j)) ? ys[j] : -INF;
  }
}
template <class T, class F> void write_filtered(T*, int64_t, const F&, const Cut&) {}

// logits [rows, V] with row stride; settings [rows]. token_ids and largest [rows].
void sample(void* logits, const float* temperature, const float* min_p, const int64_t* top_k,
            const double* top_p, const double* uniform, int64_t* token_ids, float* largest,
            int64_t rows, int64_t vocabulary, int64_t stride, float greedy_below,
            int32_t keep_filtered, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    parallel(rows, rows * vocabulary / 8, [&](int64_t r) {
      T* x = static_cast<T*>(logits) + r * stride;
      Row<T> row(x, vocabulary);
      row.scan();
      largest[r] = row.largest_or_nan();
      token_ids[r] = 0;
      if (row.bad || row.largest == -INF) return;
      if (temperature[r] < greedy_below) {
        token_ids[r] = row.first_largest();
        return;
      }
      const Choice choice = {temperature[r], min_p[r], top_k[r], top_p[r], uniform[r]};
      Cut cut;
      const Scaled scaled = {vset(1.0f / choice.temperature)};
      token_ids[r] = choice.temperature == 1.0f ? choose(row, Same(), choice, cut)
                                                : choose(row, scaled, choice, cut);
      if (keep_filtered) write_filtered(x, vocabulary, scaled, cut);
    });
  });
}

// --- log-probabilities --------------------------------------------------------------------------

// Ascending, with room for as many more behind them. Merge sort over insertion-sorted runs.
inline uint64_t* sort(uint64_t* a, uint64_t* b, int64_t n) {
  constexpr int64_t run = 16;
  for (int64_t s = 0; s < n; s += run) {
    for (int64_t i = s + 1; i < min_of(s + run, n); ++i) {
      const uint64_t v = a[i];
      int64_t j = i;
      for (; j > s && a[j - 1] > v; --j) a[j] = a[j - 1];
      a[j] = v;
    }
  }
  for (int64_t width = run; width < n; width *= 2) {
    for (int64_t s = 0; s < n; s += 2 * width) {
      int64_t i = s, j = min_of(s + width, n);
      const int64_t middle = j, end = min_of(s + 2 * width, n);
      for (int64_t o = s; o < end; ++o) b[o] = i < middle && (j >= end || a[i] <= a[j]) ? a[i++] : a[j++];
    }
    uint64_t* swapped = a;
    a = b;
    b = swapped;
  }
  return a;
}

struct Described {
  int64_t* ids;
  float* values;
  int64_t* ranks;
  int64_t size;
  void add(int64_t id, float value, int64_t rank) {
    ids[size] = id;
    values[size] = value;
    ranks[size] = rank;
    ++size;
  }
};

// Entries of one row: the token, then the `count` best without it.
template <class T, class F>
void describe(Row<T>& row, const F& f, int64_t token, int64_t count, Described& out) {
  float lanes[W];
  st(lanes, f(vset(to_float(row.x[token]))));
  const float own = lanes[0];
  int64_t rank = 1;
  const vf mine = vset(own);
  for (int64_t c = 0; c < row.chunks; ++c) {  // lanes whose largest is not greater hold none
    if ((~at_least(mine, ld(row.lane_maxima + c * W)) & ((1u << W) - 1)) == 0) continue;
    const T* p = row.chunk(c);
    for (int j = 0; j < 16; ++j) {
      rank += W - __builtin_popcount(at_least(mine, f(ld(p + j * W))));
    }
  }
  out.add(token, own, rank);
  if (count < 1) return;
  row.collect(f, bound_of_largest(row.lane_maxima, row.chunks * W, count, count / 8 + 16, row.largest));
  const Candidates& c = row.found;
  uint64_t* keys = static_cast<uint64_t*>(scratch(SCRATCH_A, size_t(c.size) * 16 + 64));
  for (int64_t i = 0; i < c.size; ++i) {
    const uint32_t order = uint32_t(key_of(c.ys[i] + 0.0f)) ^ 0x80000000u;  // + 0 makes -0 equal 0
    keys[i] = uint64_t(~order) << 32 | uint32_t(c.ids[i]);
  }
  keys = sort(keys, keys + c.size, c.size);
  int64_t equals = 0;
  for (int64_t i = 0; i < min_of(count, c.size); ++i) {
    if (i == 0 || keys[i] >> 32 != keys[i - 1] >> 32) equals = i + 1;
    const int64_t id = int64_t(keys[i] & 0xffffffffu);
    const float value = of_key(int32_t(~uint32_t(keys[i] >> 32) ^ 0x80000000u));
    if (id != token) out.add(id, value, equals);
  }
}

// logits [rows, V] with row stride, token_ids and counts [rows]; ids, values and ranks
// [rows, width], sizes [rows].
int32_t top_logprobs(const void* logits, const int64_t* token_ids, const int64_t* counts,
                     int64_t* ids, float* values, int64_t* ranks, int64_t* sizes, int64_t rows,
                     int64_t vocabulary, int64_t stride, int64_t width, int32_t normalize,
                     int32_t dtype) {
  for (int64_t r = 0; r < rows; ++r) {
    if (token_ids[r] < 0 || token_ids[r] >= vocabulary) return BAD_INDEX;
    if (counts[r] < 0 || counts[r] >= width) return BAD_LENGTHS;
  }
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    parallel(rows, rows * vocabulary / 8, [&](int64_t r) {
      Row<T> row(static_cast<const T*>(logits) + r * stride, vocabulary);
      row.scan();
      Described out = {ids + r * width, values + r * width, ranks + r * width, 0};
      if (row.bad || (normalize && row.largest == -INF)) {
        out.add(token_ids[r], __builtin_nanf(""), 1);
      } else if (normalize) {
        const auto sums = row.template sum<true>(Same(), row.largest - WEIGHTLESS, INF, -INF);
        const LogProb f = {vset(row.largest), vset(float(__builtin_log(sums.above)))};
        row.transform(f);
        describe(row, f, token_ids[r], counts[r], out);
      } else {
        describe(row, Same(), token_ids[r], counts[r], out);
      }
      sizes[r] = out.size;
    });
  });
  return OK;
}

}  // namespace
}  // namespace headrace::HR_ISA
