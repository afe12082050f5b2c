// Recurrent layers: convolution over a request's last inputs, scans, the delta rule, and the norm with
// a gate behind them. Definitions are in headrace_core.ops.recurrent.
//
// A task is one request and a run of its channels, or one of its heads. It takes the state into memory
// of its own, goes through the request's tokens in their order and puts the state where it belongs. What
// is kept between steps is float32 (inputs as they are, in the convolution), and the order of a sum
// depends on sizes alone: however a request is cut into steps, and whatever runs beside it, the bits are
// the same.

namespace headrace::HR_ISA {
namespace {

// The states of one layer, and whose they are. Strides are in elements.
struct States {
  void* data;  // null while memory is profiled: nothing is read or kept
  const int64_t* in;
  const int64_t* out;
  const int32_t* cu_seqlens;
  int64_t requests, tokens, blocks, stride;
};

inline int32_t check_states(const States& s) {
  if (s.cu_seqlens[0] != 0 || s.cu_seqlens[s.requests] > s.tokens) return BAD_LENGTHS;
  for (int64_t b = 0; b < s.requests; ++b) {
    if (s.cu_seqlens[b + 1] < s.cu_seqlens[b]) return BAD_LENGTHS;
    if (s.data == nullptr) continue;
    if (s.in[b] < -1 || s.in[b] >= s.blocks || s.out[b] < 0 || s.out[b] >= s.blocks) return BAD_INDEX;
  }
  return OK;
}

// f(piece, first, end, from, to) for each piece of each request that has tokens: its tokens, and where
// its state is and goes to, null for nothing. Rows behind the last request's become 0.
template <class S, class T, class F>
inline void over_requests(const States& s, int64_t pieces, int64_t work, T* out, int64_t row, const F& f) {
  parallel(s.requests * pieces, work, [&](int64_t i) {
    const int64_t b = i / pieces, first = s.cu_seqlens[b], end = s.cu_seqlens[b + 1];
    if (first == end) return;
    S* data = static_cast<S*>(s.data);
    const S* from = data == nullptr || s.in[b] < 0 ? nullptr : data + s.in[b] * s.stride;
    f(i % pieces, first, end, from, data == nullptr ? nullptr : data + s.out[b] * s.stride);
  });
  const int64_t last = s.cu_seqlens[s.requests];
  __builtin_memset(static_cast<void*>(out + last * row), 0, size_t((s.tokens - last) * row) * sizeof(T));
}

// W values that lie `stride` apart, or as many as are left and then zeros.
template <class T> inline vf gather(const T* p, int64_t stride, int64_t left) {
  if (stride == 1) return ld_upto(p, left);
  float part[W] = {};
  for (int64_t i = 0; i < min_of(W, left); ++i) part[i] = to_float(p[i * stride]);
  return ld(part);
}
template <class T> inline void scatter(T* p, vf x, int64_t stride, int64_t left) {
  float part[W];
  st(part, x);
  for (int64_t i = 0; i < min_of(W, left); ++i) from_float(part[i], p[i * stride]);
}

// --- convolution ------------------------------------------------------------------------------

constexpr int64_t MAX_TAPS = 64;  // that of ops/recurrent.py
constexpr int64_t CONV_RUN = 64;  // channels of a task

template <class T> struct Conv {
  T* out;
  const T* x;
  const T* weight;
  const T* bias;
  int64_t channels, taps, row, weight_channel, weight_tap;
  int32_t kind;  // of Activation, or -1
};

inline vf conv_act(int32_t kind, vf x) { return kind < 0 ? x : act(Activation(kind), x); }

// W channels from `c` on. TAPS 0: as many as the convolution says.
template <int TAPS, class T>
inline void conv_lanes(const Conv<T>& g, int64_t c, int64_t first, int64_t end, const T* from, T* to) {
  const int64_t taps = TAPS ? TAPS : g.taps, left = g.channels - c, kept = taps - 1;
  vf held[TAPS ? TAPS : MAX_TAPS], weight[TAPS ? TAPS : MAX_TAPS];  // held: oldest first
  for (int64_t k = 0; k < taps; ++k) {
    weight[k] = gather(g.weight + c * g.weight_channel + k * g.weight_tap, g.weight_channel, left);
  }
  for (int64_t k = 0; k < kept; ++k) {
    held[k] = from == nullptr ? vzero() : gather(from + c * kept + k, kept, left);
  }
  const vf bias = g.bias == nullptr ? vzero() : ld_upto(g.bias + c, left);
  for (int64_t t = first; t < end; ++t) {
    held[kept] = ld_upto(g.x + t * g.row + c, left);
    vf sum = vmul(held[0], weight[0]);
    for (int64_t k = 1; k < taps; ++k) sum = vfma(held[k], weight[k], sum);
    st_upto(g.out + t * g.channels + c, conv_act(g.kind, vadd(sum, bias)), left);
    for (int64_t k = 0; k < kept; ++k) held[k] = held[k + 1];
  }
  if (to == nullptr) return;
  for (int64_t k = 0; k < kept; ++k) scatter(to + c * kept + k, held[k], kept, left);
}

template <class T>
inline void conv_lanes(const Conv<T>& g, int64_t c, int64_t first, int64_t end, const T* from, T* to) {
  switch (g.taps) {
    case 2: return conv_lanes<2>(g, c, first, end, from, to);
    case 3: return conv_lanes<3>(g, c, first, end, from, to);
    case 4: return conv_lanes<4>(g, c, first, end, from, to);
    default: return conv_lanes<0>(g, c, first, end, from, to);
  }
}

// x [tokens, channels], weight [channels, taps], state [blocks, channels, taps - 1] of x's dtype
int32_t causal_conv(void* out, const void* x, const void* weight, const void* bias, void* state,
                    const int64_t* state_in, const int64_t* state_out, const int32_t* cu_seqlens,
                    int64_t requests, int64_t tokens, int64_t channels, int64_t taps, int64_t row,
                    int64_t weight_channel, int64_t weight_tap, int64_t blocks, int64_t stride,
                    int32_t kind, int32_t dtype) {
  const States s{state, state_in, state_out, cu_seqlens, requests, tokens, blocks, stride};
  const int32_t status = check_states(s);
  if (status != OK) return status;
  if (taps < 1 || taps > MAX_TAPS) return BAD_LENGTHS;
  with_dtype(dtype, [&](auto* type) {
    using T = typename pointee<decltype(type)>::type;
    const Conv<T> g{static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(weight),
                    static_cast<const T*>(bias), channels, taps, row, weight_channel, weight_tap, kind};
    over_requests<T>(s, ceil_div(channels, CONV_RUN), tokens * channels * (taps + 4) / 8, g.out, channels,
                     [&](int64_t piece, int64_t first, int64_t end, const T* from, T* to) {
      const int64_t stop = min_of(channels, (piece + 1) * CONV_RUN);
      for (int64_t c = piece * CONV_RUN; c < stop; c += W) conv_lanes(g, c, first, end, from, to);
    });
  });
  return OK;
}

// --- Mamba's scan -----------------------------------------------------------------------------

template <class T> struct Selective {
  T* out;
  const T *x, *step, *key, *query, *gate;
  const float *rates, *skip, *bias;
  int64_t channels, length, x_row, step_row, key_row, query_row, gate_row, rate_channel, rate_n;
};

// W channels from `c` on, one lane each; their states lie by n, then by lane.
template <class T>
inline void scan_lanes(const Selective<T>& g, int64_t c, int64_t first, int64_t end, const float* from,
                       float* to) {
  const int64_t left = g.channels - c, n_end = g.length;
  float* rates = static_cast<float*>(scratch(SCRATCH_TASK, size_t(2 * n_end * W) * sizeof(float)));
  float* held = rates + n_end * W;
  for (int64_t n = 0; n < n_end; ++n) {
    st(rates + n * W, gather(g.rates + c * g.rate_channel + n * g.rate_n, g.rate_channel, left));
    st(held + n * W, from == nullptr ? vzero() : gather(from + c * n_end + n, n_end, left));
  }
  const vf bias = g.bias == nullptr ? vzero() : ld_upto(g.bias + c, left), skip = ld_upto(g.skip + c, left);
  for (int64_t t = first; t < end; ++t) {
    const vf x = ld_upto(g.x + t * g.x_row + c, left);
    const vf step = vsoftplus(vadd(ld_upto(g.step + t * g.step_row + c, left), bias));
    const vf taken = vmul(step, x);
    const T *key = g.key + t * g.key_row, *query = g.query + t * g.query_row;
    vf sum = vmul(skip, x);
    for (int64_t n = 0; n < n_end; ++n) {
      const vf kept = vmul(vexp(vmul(step, ld(rates + n * W))), ld(held + n * W));
      const vf now = vfma(taken, vset(to_float(key[n])), kept);
      st(held + n * W, now);
      sum = vfma(now, vset(to_float(query[n])), sum);
    }
    if (g.gate != nullptr) sum = vmul(sum, act(SILU, ld_upto(g.gate + t * g.gate_row + c, left)));
    st_upto(g.out + t * g.channels + c, sum, left);
  }
  if (to == nullptr) return;
  for (int64_t n = 0; n < n_end; ++n) scatter(to + c * n_end + n, ld(held + n * W), n_end, left);
}

// x, step and gate [tokens, channels], key and query [tokens, length], state [blocks, channels, length]
int32_t selective_scan(void* out, const void* x, const void* step, const float* rates, const void* key,
                       const void* query, const float* skip, const float* bias, const void* gate,
                       void* state, const int64_t* state_in, const int64_t* state_out,
                       const int32_t* cu_seqlens, int64_t requests, int64_t tokens, int64_t channels,
                       int64_t length, int64_t x_row, int64_t step_row, int64_t key_row, int64_t query_row,
                       int64_t gate_row, int64_t rate_channel, int64_t rate_n, int64_t blocks,
                       int64_t stride, int32_t dtype) {
  const States s{state, state_in, state_out, cu_seqlens, requests, tokens, blocks, stride};
  const int32_t status = check_states(s);
  if (status != OK) return status;
  with_dtype(dtype, [&](auto* type) {
    using T = typename pointee<decltype(type)>::type;
    const Selective<T> g{static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(step),
                         static_cast<const T*>(key), static_cast<const T*>(query),
                         static_cast<const T*>(gate), rates, skip, bias, channels, length, x_row, step_row,
                         key_row, query_row, gate_row, rate_channel, rate_n};
    over_requests<float>(s, ceil_div(channels, W), tokens * channels * length, g.out, channels,
                         [&](int64_t piece, int64_t first, int64_t end, const float* from, float* to) {
      scan_lanes(g, piece * W, first, end, from, to);
    });
  });
  return OK;
}

// --- Mamba 2's scan ---------------------------------------------------------------------------

constexpr int64_t TOKEN_RUN = 32;  // tokens whose numbers are made ready at a time

// A request's head, as many tokens of it as are ready: everything in float32.
struct HeadRun {
  float* decays;   // [tokens]
  float* taken;    // [tokens, size]: what is added, before it is multiplied with the key
  float* keys;     // [tokens, width], zeros from the length on
  float* queries;  // the same
  float* sums;     // [tokens, size]
  int64_t tokens, size, width;
};

// Two rows of the state (or one) stay in registers while the tokens pass: NV vectors from `at` on.
// What the vectors before have summed up is added to.
template <int NV, int ROWS>
inline void pass_rows(const HeadRun& g, const float* from, float* to, int64_t row, int64_t at) {
  vf held[ROWS][NV];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < NV; ++v) {
      held[r][v] = from == nullptr ? vzero() : ld(from + (row + r) * g.width + at + v * W);
    }
  }
  for (int64_t t = 0; t < g.tokens; t += 2) {
    vf sums[4] = {vzero(), vzero(), vzero(), vzero()};
    const int64_t many = min_of(2, g.tokens - t);
    for (int64_t u = 0; u < many; ++u) {
      const float *key = g.keys + (t + u) * g.width + at, *query = g.queries + (t + u) * g.width + at;
      const vf decay = vset(g.decays[t + u]);
      for (int r = 0; r < ROWS; ++r) {
        const vf taken = vset(g.taken[(t + u) * g.size + row + r]);
        vf sum = vzero();
        for (int v = 0; v < NV; ++v) {
          held[r][v] = vfma(taken, ld(key + v * W), vmul(decay, held[r][v]));
          sum = vfma(held[r][v], ld(query + v * W), sum);
        }
        sums[2 * u + r] = sum;
      }
    }
    float lanes[4];
    hsum4(sums[0], sums[1], sums[2], sums[3], lanes);
    for (int64_t u = 0; u < many; ++u) {
      for (int r = 0; r < ROWS; ++r) {
        float* to = g.sums + (t + u) * g.size + row + r;
        *to = at == 0 ? lanes[2 * u + r] : *to + lanes[2 * u + r];
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < NV; ++v) st(to + (row + r) * g.width + at + v * W, held[r][v]);
  }
}

template <int NV> inline void pass_columns(const HeadRun& g, const float* from, float* to, int64_t at) {
  int64_t row = 0;
  for (; row + 2 <= g.size; row += 2) pass_rows<NV, 2>(g, from, to, row, at);
  if (row < g.size) pass_rows<NV, 1>(g, from, to, row, at);
}

// State [size, width] before and after the run; null before: zeros.
inline void pass_tokens(const HeadRun& g, const float* from, float* to) {
  for (int64_t at = 0; at < g.width;) {
    switch (min_of(8, (g.width - at) / W)) {
      case 8: pass_columns<8>(g, from, to, at); at += 8 * W; break;
      case 4: case 5: case 6: case 7: pass_columns<4>(g, from, to, at); at += 4 * W; break;
      case 2: case 3: pass_columns<2>(g, from, to, at); at += 2 * W; break;
      default: pass_columns<1>(g, from, to, at); at += W;
    }
  }
}

// Rows of `length` values as float32, zeros from there to `width`.
template <class T>
inline void widen_rows(float* to, const T* from, int64_t rows, int64_t length, int64_t width, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; j += W) {
      const int64_t left = length - j;
      st(to + i * width + j, left > 0 ? ld_upto(from + i * stride + j, left) : vzero());
    }
  }
}
// The other way, float32.
inline void narrow_rows(float* to, const float* from, int64_t rows, int64_t length, int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < length; j += W) st_upto(to + i * length + j, ld(from + i * width + j), length - j);
  }
}

template <class T> struct StateSpace {
  T* out;
  const T *x, *step, *key, *query;
  const float *rates, *skip, *bias;
  int64_t heads, size, groups, length;
  int64_t x_row, x_head, step_row, key_row, key_group, query_row, query_group;
  float low, high;
};

// steps and decays of the tokens from `t` on
template <class T>
inline void make_steps(const StateSpace<T>& g, int64_t head, int64_t t, const HeadRun& run, float* steps) {
  const vf bias = vset(g.bias == nullptr ? 0.0f : g.bias[head]), rate = vset(g.rates[head]);
  for (int64_t i = 0; i < run.tokens; i += W) {
    vf s = vset(1.0f);
    if (g.step != nullptr) {
      const vf raw = gather(g.step + (t + i) * g.step_row + head, g.step_row, run.tokens - i);
      s = vmin(vset(g.high), vmax(vset(g.low), vsoftplus(vadd(raw, bias))));
    }
    st(steps + i, s);
    st(run.decays + i, vexp(vmul(s, rate)));
  }
}

template <class T>
inline void scan_head(const StateSpace<T>& g, int64_t head, int64_t first, int64_t end, const float* from,
                      float* to) {
  const int64_t width = round_up(g.length, W), size = g.size, group = head / (g.heads / g.groups);
  float* state = static_cast<float*>(scratch(
      SCRATCH_TASK, size_t(size * width + TOKEN_RUN * (2 + 2 * size + 2 * width) + 2 * W) * sizeof(float)));
  HeadRun run{state + size * width, nullptr, nullptr, nullptr, nullptr, 0, size, width};
  run.keys = run.decays + TOKEN_RUN;
  run.queries = run.keys + TOKEN_RUN * width;
  run.taken = run.queries + TOKEN_RUN * width;
  run.sums = run.taken + TOKEN_RUN * size;
  float* steps = run.sums + TOKEN_RUN * size;
  const int64_t own = head * size * g.length;
  // Rows of whole vectors are worked on where they are.
  const bool in_place = g.length == width && to != nullptr;
  const float* before = from == nullptr ? nullptr : from + own;
  float* after = in_place ? to + own : state;
  if (before != nullptr && g.length != width) {
    widen_rows(state, before, size, g.length, width, g.length);
    before = state;
  }
  const vf skip = vset(g.skip == nullptr ? 0.0f : g.skip[head]);
  for (int64_t t = first; t < end; t += TOKEN_RUN) {
    run.tokens = min_of(TOKEN_RUN, end - t);
    make_steps(g, head, t, run, steps);
    widen_rows(run.keys, g.key + t * g.key_row + group * g.key_group, run.tokens, g.length, width, g.key_row);
    widen_rows(run.queries, g.query + t * g.query_row + group * g.query_group, run.tokens, g.length, width,
               g.query_row);
    const T* x = g.x + t * g.x_row + head * g.x_head;
    for (int64_t i = 0; i < run.tokens; ++i) {
      for (int64_t p = 0; p < size; p += W) {
        st_upto(run.taken + i * size + p, vmul(vset(steps[i]), ld_upto(x + i * g.x_row + p, size - p)), size - p);
      }
    }
    pass_tokens(run, before, after);
    before = after;
    T* out = g.out + (t * g.heads + head) * size;
    for (int64_t i = 0; i < run.tokens; ++i) {
      for (int64_t p = 0; p < size; p += W) {
        const vf sum = ld_upto(run.sums + i * size + p, size - p);
        const vf y = g.skip == nullptr ? sum : vfma(skip, ld_upto(x + i * g.x_row + p, size - p), sum);
        st_upto(out + i * g.heads * size + p, y, size - p);
      }
    }
  }
  if (to != nullptr && !in_place) narrow_rows(to + own, state, size, g.length, width);
}

// x [tokens, heads, size], step [tokens, heads], key and query [tokens, groups, length],
// state [blocks, heads, size, length]
int32_t state_space_scan(void* out, const void* x, const void* step, const float* rates, const void* key,
                         const void* query, const float* skip, const float* bias, void* state,
                         const int64_t* state_in, const int64_t* state_out, const int32_t* cu_seqlens,
                         int64_t requests, int64_t tokens, int64_t heads, int64_t size, int64_t groups,
                         int64_t length, int64_t x_row, int64_t x_head, int64_t step_row, int64_t key_row,
                         int64_t key_group, int64_t query_row, int64_t query_group, int64_t blocks,
                         int64_t stride, float low, float high, int32_t dtype) {
  const States s{state, state_in, state_out, cu_seqlens, requests, tokens, blocks, stride};
  const int32_t status = check_states(s);
  if (status != OK) return status;
  with_dtype(dtype, [&](auto* type) {
    using T = typename pointee<decltype(type)>::type;
    const StateSpace<T> g{static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(step),
                          static_cast<const T*>(key), static_cast<const T*>(query), rates, skip, bias,
                          heads, size, groups, length, x_row, x_head, step_row, key_row, key_group,
                          query_row, query_group, low, high};
    over_requests<float>(s, heads, tokens * heads * size * length / 8, g.out, heads * size,
                         [&](int64_t head, int64_t first, int64_t end, const float* from, float* to) {
      scan_head(g, head, first, end, from, to);
    });
  });
  return OK;
}

// --- the delta rule ---------------------------------------------------------------------------

constexpr int VECTORS = 2;          // of values side by side, so that their sums overlap
constexpr int64_t LANES = VECTORS * W;
constexpr int SUMS_OF_KEYS = 4;     // running sums over the key's channels, then a fixed tree

template <class T> struct Delta {
  T* out;
  const T *query, *key, *value, *gate, *beta;
  const float *rates, *bias;  // rates: the logarithm of what the gate is multiplied with
  int64_t key_heads, heads, length, size;
  int64_t query_row, query_head, key_row, key_head, value_row, value_head, gate_row, gate_head, beta_row;
  float scale, eps, beta_scale;  // eps below 0: query and key are as they come
  float lower;                   // of the decay's logarithm, if below 0
  bool by_channel;               // a decay for each channel of the key
};

// A row as float32, divided by its length if eps is at least 0; zeros from the length on.
template <class T> inline void unit_row(float* to, const T* from, int64_t length, int64_t width, float eps) {
  widen_rows(to, from, 1, length, width, 0);
  if (eps < 0) return;
  const float sum = hsum(sum_lanes(length, [to](int64_t j, int64_t left) {
    const vf v = ld_upto(to + j, left);
    return vmul(v, v);
  }));
  const vf scale = vset(1.0f / __builtin_sqrtf(sum + eps));
  for (int64_t j = 0; j < width; j += W) st(to + j, vmul(ld(to + j), scale));
}

struct DeltaRun {
  float *keys, *queries, *decays;  // [tokens, width]
  float* strengths;                // [tokens]
  int64_t tokens, width;
};

template <class T>
inline void make_ready(const Delta<T>& g, int64_t head, int64_t t, const DeltaRun& run) {
  const int64_t key_head = head / (g.heads / g.key_heads);
  const vf rate = vexp(vset(g.rates[head]));
  const auto decay = [&](vf gate, vf bias) {
    const vf opened = vadd(gate, bias);
    if (g.lower < 0) return vexp(vmul(vset(g.lower), vsigmoid(vmul(rate, opened))));
    return vexp(vsub(vzero(), vmul(rate, vsoftplus(opened))));
  };
  for (int64_t i = 0; i < run.tokens; ++i) {
    const int64_t row = t + i;
    float* decays = run.decays + i * run.width;
    unit_row(run.queries + i * run.width, g.query + row * g.query_row + key_head * g.query_head, g.length,
             run.width, g.eps);
    unit_row(run.keys + i * run.width, g.key + row * g.key_row + key_head * g.key_head, g.length, run.width,
             g.eps);
    const T* gate = g.gate + row * g.gate_row + head * g.gate_head;
    if (g.by_channel) {
      for (int64_t n = 0; n < g.length; n += W) {
        st(decays + n, decay(ld_upto(gate + n, g.length - n), ld_upto(g.bias + head * g.length + n, g.length - n)));
      }
    } else {
      const vf all = decay(vset(to_float(*gate)), vset(g.bias[head]));
      for (int64_t n = 0; n < run.width; n += W) st(decays + n, all);
    }
    float strength[W];
    st(strength, vmul(vset(g.beta_scale), vsigmoid(vset(to_float(g.beta[row * g.beta_row + head])))));
    run.strengths[i] = strength[0];
  }
}

// One token, VECTORS vectors of values: state [width, LANES].
inline void delta_token(const DeltaRun& run, int64_t i, float* state, const vf* value, vf* out) {
  const float *key = run.keys + i * run.width, *query = run.queries + i * run.width;
  const float* decays = run.decays + i * run.width;
  vf sums[SUMS_OF_KEYS][VECTORS], added[VECTORS];
  const auto total = [&](int v) { return vadd(vadd(sums[0][v], sums[1][v]), vadd(sums[2][v], sums[3][v])); };
  for (auto& sum : sums) for (int v = 0; v < VECTORS; ++v) sum[v] = vzero();
  for (int64_t n = 0; n < run.width; n += SUMS_OF_KEYS) {
    for (int j = 0; j < SUMS_OF_KEYS; ++j) {
      const vf k = vset(key[n + j]), decay = vset(decays[n + j]);
      for (int v = 0; v < VECTORS; ++v) {
        float* at = state + (n + j) * LANES + v * W;
        const vf held = vmul(decay, ld(at));
        st(at, held);
        sums[j][v] = vfma(held, k, sums[j][v]);
      }
    }
  }
  for (int v = 0; v < VECTORS; ++v) added[v] = vmul(vset(run.strengths[i]), vsub(value[v], total(v)));
  for (auto& sum : sums) for (int v = 0; v < VECTORS; ++v) sum[v] = vzero();
  for (int64_t n = 0; n < run.width; n += SUMS_OF_KEYS) {
    for (int j = 0; j < SUMS_OF_KEYS; ++j) {
      const vf k = vset(key[n + j]), q = vset(query[n + j]);
      for (int v = 0; v < VECTORS; ++v) {
        float* at = state + (n + j) * LANES + v * W;
        const vf held = vfma(k, added[v], ld(at));
        st(at, held);
        sums[j][v] = vfma(held, q, sums[j][v]);
      }
    }
  }
  for (int v = 0; v < VECTORS; ++v) out[v] = total(v);
}

// The state [length, size] in runs of LANES values, each [width, LANES]; and back.
inline void take_state(float* to, const float* from, int64_t length, int64_t size, int64_t width) {
  for (int64_t p = 0; p < size; p += LANES) {
    for (int64_t n = 0; n < width; ++n) {
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t at = p + v * W, left = size - at;
        st(to + (p * width + n * LANES) + v * W,
           from != nullptr && n < length && left > 0 ? ld_upto(from + n * size + at, left) : vzero());
      }
    }
  }
}
inline void put_state(float* to, const float* from, int64_t length, int64_t size, int64_t width) {
  for (int64_t p = 0; p < size; p += LANES) {
    for (int64_t n = 0; n < length; ++n) {
      for (int v = 0; v < VECTORS && p + v * W < size; ++v) {
        const int64_t at = p + v * W;
        st_upto(to + n * size + at, ld(from + p * width + n * LANES + v * W), size - at);
      }
    }
  }
}

template <class T>
inline void delta_head(const Delta<T>& g, int64_t head, int64_t first, int64_t end, const float* from,
                       float* to) {
  const int64_t width = round_up(g.length, W), size = round_up(g.size, LANES);
  float* state = static_cast<float*>(
      scratch(SCRATCH_TASK, size_t(size * width + TOKEN_RUN * (3 * width + 1)) * sizeof(float)));
  float* rows = state + size * width;
  DeltaRun run{rows, rows + TOKEN_RUN * width, rows + 2 * TOKEN_RUN * width, rows + 3 * TOKEN_RUN * width, 0, width};
  take_state(state, from == nullptr ? nullptr : from + head * g.length * g.size, g.length, g.size, width);
  for (int64_t t = first; t < end; t += TOKEN_RUN) {
    run.tokens = min_of(TOKEN_RUN, end - t);
    make_ready(g, head, t, run);
    for (int64_t p = 0; p < g.size; p += LANES) {
      for (int64_t i = 0; i < run.tokens; ++i) {
        const T* from_value = g.value + (t + i) * g.value_row + head * g.value_head;
        T* out = g.out + ((t + i) * g.heads + head) * g.size;
        vf value[VECTORS], sums[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
          const int64_t left = g.size - p - v * W;
          value[v] = left > 0 ? ld_upto(from_value + p + v * W, left) : vzero();
        }
        delta_token(run, i, state + p * width, value, sums);
        for (int v = 0; v < VECTORS; ++v) {
          const int64_t left = g.size - p - v * W;
          if (left > 0) st_upto(out + p + v * W, vmul(vset(g.scale), sums[v]), left);
        }
      }
    }
  }
  if (to != nullptr) put_state(to + head * g.length * g.size, state, g.length, g.size, width);
}

// query and key [tokens, key_heads, length], value [tokens, heads, size], gate [tokens, heads] or
// [tokens, heads, length], beta [tokens, heads], state [blocks, heads, length, size]
int32_t delta_rule(void* out, const void* query, const void* key, const void* value, const void* gate,
                   const void* beta, const float* rates, const float* bias, void* state,
                   const int64_t* state_in, const int64_t* state_out, const int32_t* cu_seqlens,
                   int64_t requests, int64_t tokens, int64_t key_heads, int64_t heads, int64_t length,
                   int64_t size, int64_t query_row, int64_t query_head, int64_t key_row, int64_t key_head,
                   int64_t value_row, int64_t value_head, int64_t gate_row, int64_t gate_head,
                   int64_t beta_row, int64_t blocks, int64_t stride, float scale, float eps,
                   float beta_scale, float lower, int32_t by_channel, int32_t dtype) {
  const States s{state, state_in, state_out, cu_seqlens, requests, tokens, blocks, stride};
  const int32_t status = check_states(s);
  if (status != OK) return status;
  with_dtype(dtype, [&](auto* type) {
    using T = typename pointee<decltype(type)>::type;
    const Delta<T> g{static_cast<T*>(out), static_cast<const T*>(query), static_cast<const T*>(key),
                     static_cast<const T*>(value), static_cast<const T*>(gate), static_cast<const T*>(beta),
                     rates, bias, key_heads, heads, length, size, query_row, query_head, key_row, key_head,
                     value_row, value_head, gate_row, gate_head, beta_row, scale, eps, beta_scale,
                     lower, by_channel != 0};
    over_requests<float>(s, heads, tokens * heads * size * length / 4, g.out, heads * size,
                         [&](int64_t head, int64_t first, int64_t end, const float* from, float* to) {
      delta_head(g, head, first, end, from, to);
    });
  });
  return OK;
}

// --- the matrix memory of xLSTM ---------------------------------------------------------------

template <class T> struct MatrixMemory {
  T* out;
  const T *query, *key, *value;
  const float *input, *forget;
  int64_t heads, length, size;
  int64_t query_row, query_head, key_row, key_head, value_row, value_head, input_row, forget_row;
  float scale, eps;
};

inline float first_lane(vf x) {
  float part[W];
  st(part, x);
  return part[0];
}

// One token of a head. memory [length, size], then normaliser [length], then the logarithm of what both are
// multiples of; key, query [length] and sums [size] are memory of the task's own.
template <class T>
inline void memorise(const MatrixMemory<T>& g, int64_t t, int64_t head, float* memory, float* key, float* query,
                     float* sums) {
  float *normaliser = memory + g.length * g.size, *log = normaliser + g.length;
  const float forget = g.forget[t * g.forget_row + head], input = g.input[t * g.input_row + head];
  const float kept = *log - first_lane(vsoftplus(vset(-forget)));
  const float most = kept > input ? kept : input;
  const vf old = vexp(vset(kept - most)), fresh = vexp(vset(input - most));
  const T* value = g.value + t * g.value_row + head * g.value_head;
  *log = most;
  const float weight = hsum(sum_lanes(g.length, [&](int64_t n, int64_t left) {
    const vf k = vmul(fresh, ld_upto(g.key + t * g.key_row + head * g.key_head + n, left));
    const vf q = vmul(vset(g.scale), ld_upto(g.query + t * g.query_row + head * g.query_head + n, left));
    const vf held = vfma(old, ld_upto(normaliser + n, left), k);
    st_upto(key + n, k, left);
    st_upto(query + n, q, left);
    st_upto(normaliser + n, held, left);
    return vmul(held, q);
  }));
  for (int64_t p = 0; p < g.size; p += W) st_upto(sums + p, vzero(), g.size - p);
  for (int64_t n = 0; n < g.length; ++n) {
    const vf k = vset(key[n]), q = vset(query[n]);
    float* row = memory + n * g.size;
    for (int64_t p = 0; p < g.size; p += W) {
      const int64_t left = g.size - p;
      const vf held = vfma(k, ld_upto(value + p, left), vmul(old, ld_upto(row + p, left)));
      st_upto(row + p, held, left);
      st_upto(sums + p, vfma(q, held, ld_upto(sums + p, left)), left);
    }
  }
  const float least = first_lane(vexp(vset(-most))), size = weight < 0 ? -weight : weight;
  const vf divisor = vset((size > least ? size : least) + g.eps);
  T* out = g.out + (t * g.heads + head) * g.size;
  for (int64_t p = 0; p < g.size; p += W) st_upto(out + p, vdiv(ld_upto(sums + p, g.size - p), divisor), g.size - p);
}

// query and key [tokens, heads, length], value [tokens, heads, size], gates [tokens, heads] float32,
// state [blocks, heads, length * size + length + 1]
int32_t mlstm(void* out, const void* query, const void* key, const void* value, const float* input,
              const float* forget, void* state, const int64_t* state_in, const int64_t* state_out,
              const int32_t* cu_seqlens, int64_t requests, int64_t tokens, int64_t heads, int64_t length,
              int64_t size, int64_t query_row, int64_t query_head, int64_t key_row, int64_t key_head,
              int64_t value_row, int64_t value_head, int64_t input_row, int64_t forget_row, int64_t blocks,
              int64_t stride, float scale, float eps, int32_t dtype) {
  const States s{state, state_in, state_out, cu_seqlens, requests, tokens, blocks, stride};
  const int32_t status = check_states(s);
  if (status != OK) return status;
  with_dtype(dtype, [&](auto* type) {
    using T = typename pointee<decltype(type)>::type;
    const MatrixMemory<T> g{static_cast<T*>(out), static_cast<const T*>(query), static_cast<const T*>(key),
                            static_cast<const T*>(value), input, forget, heads, length, size, query_row,
                            query_head, key_row, key_head, value_row, value_head, input_row, forget_row, scale,
                            eps};
    const int64_t held = length * size + length + 1;
    over_requests<float>(s, heads, tokens * heads * size * length / 4, g.out, heads * size,
                         [&](int64_t head, int64_t first, int64_t end, const float* from, float* to) {
      float* own = static_cast<float*>(
          scratch(SCRATCH_TASK, size_t(held + 2 * (length + W) + size + W) * sizeof(float)));
      float* memory = to == nullptr ? own : to + head * held;
      if (from == nullptr) {
        __builtin_memset(memory, 0, size_t(held) * sizeof(float));
      } else if (memory != from + head * held) {
        __builtin_memcpy(memory, from + head * held, size_t(held) * sizeof(float));
      }
      float* row = own + held;
      for (int64_t t = first; t < end; ++t) {
        memorise(g, t, head, memory, row, row + length + W, row + 2 * (length + W));
      }
    });
  });
  return OK;
}

// --- recurrences of single channels -----------------------------------------------------------

// x and both gates [tokens, channels], state [blocks, channels]
int32_t rg_lru(void* out, const void* x, const void* input_gate, const void* decay_gate, const float* decay,
               const float* input_bias, const float* decay_bias, void* state, const int64_t* state_in,
               const int64_t* state_out, const int32_t* cu_seqlens, int64_t requests, int64_t tokens,
               int64_t channels, int64_t x_row, int64_t input_row, int64_t decay_row, int64_t blocks,
               int64_t stride, int32_t dtype) {
  const States s{state, state_in, state_out, cu_seqlens, requests, tokens, blocks, stride};
  const int32_t status = check_states(s);
  if (status != OK) return status;
  with_dtype(dtype, [&](auto* type) {
    using T = typename pointee<decltype(type)>::type;
    over_requests<float>(s, ceil_div(channels, W), tokens * channels * 8, static_cast<T*>(out), channels,
                         [&](int64_t piece, int64_t first, int64_t end, const float* from, float* to) {
      const int64_t c = piece * W, left = channels - c;
      const vf rate = vmul(vset(-8.0f), vsoftplus(ld_upto(decay + c, left)));
      const vf input = ld_upto(input_bias + c, left), opens = ld_upto(decay_bias + c, left);
      vf held = from == nullptr ? vzero() : ld_upto(from + c, left);
      for (int64_t t = first; t < end; ++t) {
        const vf gate = vadd(ld_upto(static_cast<const T*>(input_gate) + t * input_row + c, left), input);
        const vf taken = vmul(ld_upto(static_cast<const T*>(x) + t * x_row + c, left), vsigmoid(gate));
        const vf open = vadd(ld_upto(static_cast<const T*>(decay_gate) + t * decay_row + c, left), opens);
        const vf log = vmul(rate, vsigmoid(open));
        float share[W];
        st(share, vsub(vset(1.0f), vexp(vadd(log, log))));
        for (int i = 0; i < W; ++i) share[i] = __builtin_sqrtf(share[i]);
        const bool begins = from == nullptr && t == first;
        held = begins ? taken : vfma(ld(share), taken, vmul(vexp(log), held));
        st_upto(static_cast<T*>(out) + t * channels + c, held, left);
      }
      if (to != nullptr) st_upto(to + c, held, left);
    });
  });
  return OK;
}

constexpr float WKV_BEGIN = -1e38f;

// A numerator and a denominator, times e^log.
struct Average { vf total, weight, log; };

// With one more term, of weight e^k.
inline Average averaged(const Average& a, vf k, vf value) {
  const vf most = vmax(a.log, k), old = vexp(vsub(a.log, most)), now = vexp(vsub(k, most));
  return {vfma(now, value, vmul(old, a.total)), vfma(old, a.weight, now), most};
}

// key and value [tokens, channels], state [blocks, 3, channels]
int32_t wkv(void* out, const void* key, const void* value, const float* decay, const float* first_weight,
            void* state, const int64_t* state_in, const int64_t* state_out, const int32_t* cu_seqlens,
            int64_t requests, int64_t tokens, int64_t channels, int64_t key_row, int64_t value_row,
            int64_t blocks, int64_t stride, int32_t dtype) {
  const States s{state, state_in, state_out, cu_seqlens, requests, tokens, blocks, stride};
  const int32_t status = check_states(s);
  if (status != OK) return status;
  with_dtype(dtype, [&](auto* type) {
    using T = typename pointee<decltype(type)>::type;
    over_requests<float>(s, ceil_div(channels, W), tokens * channels * 8, static_cast<T*>(out), channels,
                         [&](int64_t piece, int64_t first, int64_t end, const float* from, float* to) {
      const int64_t c = piece * W, left = channels - c;
      const vf rate = ld_upto(decay + c, left), bonus = ld_upto(first_weight + c, left);
      Average held{vzero(), vzero(), vset(WKV_BEGIN)};
      if (from != nullptr) {
        held = {ld_upto(from + c, left), ld_upto(from + channels + c, left), ld_upto(from + 2 * channels + c, left)};
      }
      for (int64_t t = first; t < end; ++t) {
        const vf k = ld_upto(static_cast<const T*>(key) + t * key_row + c, left);
        const vf v = ld_upto(static_cast<const T*>(value) + t * value_row + c, left);
        const Average now = averaged(held, vadd(bonus, k), v);
        st_upto(static_cast<T*>(out) + t * channels + c, vdiv(now.total, now.weight), left);
        held = averaged({held.total, held.weight, vadd(held.log, rate)}, k, v);
      }
      if (to == nullptr) return;
      st_upto(to + c, held.total, left);
      st_upto(to + channels + c, held.weight, left);
      st_upto(to + 2 * channels + c, held.log, left);
    });
  });
  return OK;
}

// --- the norm behind them ---------------------------------------------------------------------

// x and gate [rows, groups * size]; the weight is of all groups, or one for each (weight_group 0).
void gated_rms_norm(void* out, const void* x, const void* gate, const void* weight, int64_t rows,
                    int64_t groups, int64_t size, int64_t row, int64_t gate_row, int64_t weight_group,
                    float eps, int32_t norm_first, int32_t sigmoid, int32_t dtype, int32_t weight_dtype) {
  with_weight_dtype(dtype, weight_dtype, [&](auto* type, auto* weight_type) {
    using T = typename pointee<decltype(type)>::type;
    using WT = typename pointee<decltype(weight_type)>::type;
    parallel_ranges(rows * groups, rows * groups * size / 2, [&](int64_t begin, int64_t end) {
      float* product = static_cast<float*>(scratch(SCRATCH_TASK, size_t(2 * (size + W)) * sizeof(float)));
      float* opened = product + size + W;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t group = i % groups, at = group * size;
        const T* from = static_cast<const T*>(x) + i / groups * row + at;
        const T* by = static_cast<const T*>(gate) + i / groups * gate_row + at;
        const WT* w = static_cast<const WT*>(weight) + group * weight_group;
        const float mean = hsum(sum_lanes(size, [&](int64_t j, int64_t left) {
          const vf g = ld_upto(by + j, left), open = sigmoid ? vsigmoid(g) : act(SILU, g);
          const vf v = norm_first ? ld_upto(from + j, left) : vmul(ld_upto(from + j, left), open);
          st_upto(opened + j, open, left);
          st_upto(product + j, v, left);
          return vmul(v, v);
        })) / float(size);
        const vf scale = vset(1.0f / __builtin_sqrtf(mean + eps));
        for (int64_t j = 0; j < size; j += W) {
          const int64_t left = size - j;
          vf v = vmul(vmul(ld_upto(product + j, left), scale), ld_upto(w + j, left));
          if (norm_first) v = vmul(v, ld_upto(opened + j, left));
          st_upto(static_cast<T*>(out) + i * size + j, v, left);
        }
      }
    });
  });
}

}  // namespace
}  // namespace headrace::HR_ISA
