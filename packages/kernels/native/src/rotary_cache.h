// Head norm, rotation and cache write: one pass over each new token's heads.
//
// The fused kernel gives the same bits as norm, rotation and write one after the other, because it
// rounds to the dtype after each.

namespace headrace::HR_ISA {
namespace {

// A tensor [T, heads, D] with unit stride in D; the others are in elements.
struct Heads {
  void* data;
  int64_t heads, row_stride, head_stride;
};

// How a cache stores values; codes are those of ops/caches.py. Paired caches have the order of
// headrace_core.ops.CacheWriteOp; only the strides of blocks and heads mean something there.
enum Storage : int64_t {
  AS_COMPUTED = 0, AS_INT8 = 1, AS_E4M3 = 2, AS_E5M2 = 3, AS_PAIRED_KEYS = 4, AS_PAIRED_VALUES = 5,
  AS_INT4 = 6  // two numbers a byte
};
constexpr int64_t PAIRED_KEYS = 16;  // side by side in a paired cache

// A scale for each row, one token's numbers of one head: it stands in the cache, is found when the row is
// written, and is finite and above 0. Strides in floats.
struct RowScales {
  float* data;  // null = rows have none
  int64_t block_stride, token_stride, head_stride;
  int64_t parts;  // of a row; each has a scale, side by side

  float* of(int64_t block, int64_t offset, int64_t head) const {
    return data + block * block_stride + offset * token_stride + head * head_stride;
  }
};

// A cache [N, S, Hk, D] with any strides, in elements; of bytes if those hold two numbers.
struct Cache {
  void* data;
  int64_t blocks, block_size;
  int64_t block_stride, token_stride, head_stride, dim_stride;
  int64_t storage;
  const float* scales;  // [Hk], what a stored 1 stands for; null = 1
  int64_t scale_stride = 1;  // 0: one for all heads
  RowScales rows{nullptr, 0, 0, 0, 1};
};

inline float scale_of(const Cache& cache, int64_t head) {
  return cache.scales == nullptr ? 1.0f : cache.scales[head * cache.scale_stride];
}

// cos and sin are R/2 values each; out may be x.
template <class T>
inline void rotate_row(T* out, const T* x, const float* cos, const float* sin, int64_t half,
                       bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
      from_float(a * cos[i] - b * sin[i], out[2 * i]);
      from_float(b * cos[i] + a * sin[i], out[2 * i + 1]);
    }
    return;
  }
  for (int64_t i = 0; i < half; i += W) {
    const int64_t left = half - i;
    const vf a = ld_upto(x + i, left), b = ld_upto(x + i + half, left);
    const vf c = ld_upto(cos + i, left), s = ld_upto(sin + i, left);
    st_upto(out + i, vsub(vmul(a, c), vmul(b, s)), left);
    st_upto(out + i + half, vadd(vmul(b, c), vmul(a, s)), left);
  }
}

// x / scale in one byte each.
template <class TC, class T>
inline void store_bytes(TC* to, int64_t stride, const T* x, int64_t dim, float scale) {
  float part[W];
  TC bytes[W];
  for (int64_t d = 0; d < dim; d += W) {
    st(part, vdiv(ld_upto(x + d, dim - d), vset(scale)));
    for (int i = 0; i < W; ++i) from_float(part[i], bytes[i]);
    const int64_t many = min_of(W, dim - d);
    if (stride == 1) {
      __builtin_memcpy(to + d, bytes, size_t(many) * sizeof(TC));
    } else {
      for (int64_t i = 0; i < many; ++i) to[(d + i) * stride] = bytes[i];
    }
  }
}

// The nearest whole number of at most `largest`; 0 for NaN.
inline int32_t whole_of(float x, float largest) {
  const float a = x > largest ? largest : x < -largest ? -largest : x;
  return x == x ? int32_t((a + 12582912.0f) - 12582912.0f) : 0;
}

// x / scale in half a byte each; dim is even.
template <class T> inline void store_nibbles(nibbles* to, const T* x, int64_t dim, float scale) {
  float part[W];
  for (int64_t d = 0; d < dim; d += W) {
    st(part, vdiv(ld_upto(x + d, dim - d), vset(scale)));
    for (int64_t i = 0; i < min_of(W, dim - d); i += 2) {
      to[(d + i) / 2].bits = uint8_t((whole_of(part[i], 7) & 15) | whole_of(part[i + 1], 7) * 16);
    }
  }
}

// What a stored 1 of a row stands for, if its largest finite number is stored as `largest`.
template <class T> inline float row_scale(const T* x, int64_t dim, float largest) {
  const vf endless = vset(__builtin_inff());
  vf most = vzero();
  for (int64_t d = 0; d < dim; d += W) {
    const vf a = vabs(ld_upto(x + d, dim - d));
    most = vmax(vless(a, endless, a, vzero()), most);
  }
  const float scale = hmax(most) / largest;
  return scale > 0.0f ? scale : 1.0f;
}

// A row, or a part of one, with a scale of its own.
template <class T> inline void store_row(void* to, int64_t storage, const T* x, int64_t dim, float* scale) {
  *scale = row_scale(x, dim, storage == AS_INT4 ? 7.0f : 127.0f);
  if (storage == AS_INT4) return store_nibbles(static_cast<nibbles*>(to), x, dim, *scale);
  store_bytes(static_cast<int8_t*>(to), 1, x, dim, *scale);
}

// Where a slot's first head begins.
inline int64_t place_of(const Cache& cache, int64_t slot, int64_t dim) {
  const int64_t block = slot / cache.block_size * cache.block_stride, offset = slot % cache.block_size;
  switch (cache.storage) {
    case AS_PAIRED_KEYS: return block + offset / PAIRED_KEYS * PAIRED_KEYS * dim + offset % PAIRED_KEYS * 2;
    case AS_PAIRED_VALUES: return block + offset / 2 * 2 * dim + offset % 2;
  }
  return block + offset * cache.token_stride;
}

// One token of keys [S / 16][D / 2][16][2].
template <class T, class N> inline void store_paired_keys(T* to, const T* x, N dim) {
  for (int64_t d = 0; d < dim; d += 2) __builtin_memcpy(to + d * PAIRED_KEYS, x + d, 2 * sizeof(T));
}

// One token of values [S / 2][D][2].
template <class T, class N> inline void store_paired_values(T* to, const T* x, N dim) {
#if defined(HR_AVX512)
  if constexpr (sizeof(T) == 2) {  // every other number; dim is a multiple of 16
    for (int64_t d = 0; d < dim; d += W) {
      const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + d)));
      _mm512_mask_storeu_epi16(to + 2 * d, 0x55555555u, words);
    }
    return;
  }
#endif
  for (int64_t d = 0; d < dim; ++d) to[2 * d] = x[d];
}

template <class T, class N>
inline void store_head(const Cache& cache, int64_t slot, int64_t place, int64_t head, const T* x, N dim) {
  const int64_t at = place + head * cache.head_stride;
  if (cache.rows.data != nullptr) {
    float* const own = cache.rows.of(slot / cache.block_size, slot % cache.block_size, head);
    return store_row(static_cast<int8_t*>(cache.data) + at, cache.storage, x, int64_t(dim), own);
  }
  const float scale = scale_of(cache, head);
  switch (cache.storage) {
    case AS_INT8: return store_bytes(static_cast<int8_t*>(cache.data) + at, cache.dim_stride, x, dim, scale);
    case AS_E4M3: return store_bytes(static_cast<e4m3*>(cache.data) + at, cache.dim_stride, x, dim, scale);
    case AS_E5M2: return store_bytes(static_cast<e5m2*>(cache.data) + at, cache.dim_stride, x, dim, scale);
  }
  T* to = static_cast<T*>(cache.data) + at;
  if (cache.storage == AS_PAIRED_KEYS) return store_paired_keys(to, x, dim);
  if (cache.storage == AS_PAIRED_VALUES) return store_paired_values(to, x, dim);
  if (cache.dim_stride == 1) {
    __builtin_memcpy(to, x, size_t(dim) * sizeof(T));
  } else {
    for (int64_t d = 0; d < dim; ++d) to[d * cache.dim_stride] = x[d];
  }
}

// What one call does to each token; absent parts are null.
struct TokenWork {
  Heads query, key, value;
  const int64_t* positions;
  const float* cos_sin;
  int64_t num_positions, cos_sin_stride, rotary_dim;
  const int64_t* slots;
  Cache key_cache, value_cache;
  const float* query_weight;  // [dim], the norm's offset added
  const float* key_weight;
  float eps;
  int64_t dim;
  bool interleaved;
};

template <class T> inline T* head_of(const Heads& h, int64_t token, int64_t head) {
  return static_cast<T*>(h.data) + token * h.row_stride + head * h.head_stride;
}

// Heads of whole vectors whose rotated halves are whole vectors too: each is read once for its norm
// and once for the rest. A shape is the types of `dim` and `half`.
template <class N, class H> struct WholeVectors {
  N dim;
  H half;  // 0 = no rotation

  template <bool normed, class T>
  void one(T* x, const float* weight, float scale, const float* cos) const {
    const vf f = vset(scale);
    const auto value = [&](int64_t j) {
      const vf v = ld(x + j);
      return normed ? vrounded<T>(vmul(vmul(v, f), ld(weight + j))) : v;
    };
    for (int64_t i = 0; i < half; i += W) {
      const vf a = value(i), b = value(i + half), c = ld(cos + i), s = ld(cos + half + i);
      st(x + i, vsub(vmul(a, c), vmul(b, s)));
      st(x + i + half, vadd(vmul(b, c), vmul(a, s)));
    }
    if (!normed) return;
    for (int64_t j = 2 * half; j < dim; j += W) st(x + j, value(j));
  }

  template <class T>
  void operator()(const TokenWork& w, const Heads& heads, int64_t token, const float* weight,
                  const float* cos) const {
    T* x = head_of<T>(heads, token, 0);
    const int64_t stride = heads.head_stride;
    if (weight == nullptr) {
      for (int64_t h = 0; h < heads.heads; ++h) one<false>(x + h * stride, weight, 0, cos);
      return;
    }
    for (int64_t h = 0; h < heads.heads; h += GROUP, x += GROUP * stride) {
      const int64_t many = min_of(GROUP, heads.heads - h);
      float scales[GROUP];
      row_sums(many, [&](int64_t i) {
        const T* from = x + i * stride;
        return sum_lanes(dim, [from](int64_t j, int64_t) {
          const vf v = ld(from + j);
          return vmul(v, v);
        });
      }, scales);
      inverse_roots(scales, dim, w.eps);
      for (int64_t i = 0; i < many; ++i) one<true>(x + i * stride, weight, scales[i], cos);
    }
  }
};

// Heads of any size, rotated either way.
struct AnyShape {
  int64_t dim;

  template <class T>
  void operator()(const TokenWork& w, const Heads& heads, int64_t token, const float* weight,
                  const float* cos) const {
    const int64_t half = w.rotary_dim / 2;
    for (int64_t h = 0; h < heads.heads; ++h) {
      T* x = head_of<T>(heads, token, h);
      if (weight != nullptr) rms_row(x, x, weight, dim, w.eps, -0.0f);  // which changes no weight
      if (cos != nullptr) rotate_row(x, x, cos, cos + half, half, w.interleaved);
    }
  }
};

template <class F> inline void with_shape(const TokenWork& w, const F& f) {
  const int64_t half = w.cos_sin == nullptr ? 0 : w.rotary_dim / 2;
  if (w.dim % W != 0 || half % W != 0 || (w.interleaved && half != 0)) return f(AnyShape{w.dim});
  if (w.dim == 128 && half == 64) return f(WholeVectors<Known<128>, Known<64>>());
  if (w.dim == 64 && half == 32) return f(WholeVectors<Known<64>, Known<32>>());
  f(WholeVectors<int64_t, int64_t>{w.dim, half});
}

// Tokens' heads and slots lie pages apart, where the machine does not look ahead by itself.
template <class T> inline void look_ahead(const Heads& heads, int64_t token, int64_t dim) {
  for (int64_t h = 0; h < heads.heads; ++h) {
    const char* x = reinterpret_cast<const char*>(head_of<T>(heads, token, h));
    for (int64_t at = 0; at < dim * int64_t(sizeof(T)); at += 64) __builtin_prefetch(x + at, 1);
  }
}
inline void look_ahead(const Cache& cache, int64_t slot, int64_t heads, int64_t dim, int64_t value_bytes) {
  const bool small = (cache.storage >= AS_INT8 && cache.storage <= AS_E5M2) || cache.storage == AS_INT4;
  const int64_t bytes = small ? 1 : value_bytes;
  const char* first = static_cast<const char*>(cache.data) + place_of(cache, slot, dim) * bytes;
  int64_t span = dim * bytes;  // in which a head's values lie
  switch (cache.storage) {
    case AS_PAIRED_KEYS: span *= PAIRED_KEYS; break;
    case AS_PAIRED_VALUES: span *= 2; break;
    case AS_INT4: span /= 2; break;
    default: if (cache.dim_stride != 1) return;
  }
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t at = 0; at < span; at += 64) __builtin_prefetch(first + h * cache.head_stride * bytes + at, 1);
  }
}
template <class T> inline void look_ahead(const TokenWork& w, int64_t token) {
  look_ahead<T>(w.query, token, w.dim);
  look_ahead<T>(w.key, token, w.dim);
  if (w.slots == nullptr || w.slots[token] < 0) return;
  look_ahead<T>(w.value, token, w.dim);
  if (w.slots[token] >= w.key_cache.blocks * w.key_cache.block_size) return;
  // Paired tokens share lines: in a prompt, those of the token before.
  const bool shared = w.key_cache.storage == AS_PAIRED_KEYS && token > 0 &&
                      w.slots[token] % PAIRED_KEYS != 0 && w.slots[token - 1] == w.slots[token] - 1;
  if (shared) return;
  look_ahead(w.key_cache, w.slots[token], w.key.heads, w.dim, sizeof(T));
  look_ahead(w.value_cache, w.slots[token], w.key.heads, w.dim, sizeof(T));
}

template <class T, class Shape> inline int32_t do_token(const TokenWork& w, int64_t t, const Shape& shape) {
  const float* cos = nullptr;
  if (w.cos_sin != nullptr) {
    const int64_t p = w.positions[t];
    if (p < 0 || p >= w.num_positions) return BAD_INDEX;
    cos = w.cos_sin + p * w.cos_sin_stride;
  }
  shape.template operator()<T>(w, w.query, t, w.query_weight, cos);
  const int64_t slot = w.slots == nullptr ? -1 : w.slots[t];
  if (slot >= w.key_cache.blocks * w.key_cache.block_size && w.slots != nullptr) return BAD_INDEX;
  shape.template operator()<T>(w, w.key, t, w.key_weight, cos);
  if (slot < 0) return OK;
  const int64_t key_at = place_of(w.key_cache, slot, w.dim), value_at = place_of(w.value_cache, slot, w.dim);
  for (int64_t h = 0; h < w.key.heads; ++h) {
    store_head(w.key_cache, slot, key_at, h, head_of<T>(w.key, t, h), shape.dim);
    store_head(w.value_cache, slot, value_at, h, head_of<T>(w.value, t, h), shape.dim);
  }
  return OK;
}

int32_t do_tokens(const TokenWork& w, int64_t tokens, int32_t dtype) {
  int32_t status = OK;
  const int64_t work = tokens * (w.query.heads + 2 * w.key.heads) * w.dim / 8;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    with_shape(w, [&](const auto& shape) {
      parallel_ranges(tokens, work, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          if (i + 1 < end) look_ahead<T>(w, i + 1);
          if (do_token<T>(w, i, shape) != OK) __atomic_store_n(&status, int32_t(BAD_INDEX), __ATOMIC_RELAXED);
        }
      });
    });
  });
  return status;
}

// out = weight + offset in float32; nothing for no weight.
inline void widen_weight(float* out, const void* weight, int64_t n, float offset, int32_t dtype) {
  if (weight == nullptr) return;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    for (int64_t j = 0; j < n; j += W) {
      st_upto(out + j, vadd(ld_upto(static_cast<const T*>(weight) + j, n - j), vset(offset)), n - j);
    }
  });
}

int32_t rotary(void* query, void* key, const int64_t* positions, const float* cos_sin, int64_t tokens,
               int64_t q_heads, int64_t k_heads, int64_t dim, int64_t q_row, int64_t q_head,
               int64_t k_row, int64_t k_head, int64_t num_positions, int64_t rotary_dim,
               int64_t cos_sin_stride, int32_t interleaved, int32_t dtype) {
  TokenWork w{};
  w.query = {query, q_heads, q_row, q_head};
  w.key = {key, k_heads, k_row, k_head};
  w.positions = positions;
  w.cos_sin = cos_sin;
  w.num_positions = num_positions;
  w.cos_sin_stride = cos_sin_stride;
  w.rotary_dim = rotary_dim;
  w.dim = dim;
  w.interleaved = interleaved != 0;
  return do_tokens(w, tokens, dtype);
}

// geometry: blocks, block_size, then block, token, head and dim stride of keys, then of values,
// the storage of both, addresses of the scales of keys and of values (0 = none), and of the scales of rows
// of keys, then of values, address (0 = none), block, token and head stride.
inline void set_caches(TokenWork& w, void* key_cache, void* value_cache, const int64_t* geometry) {
  const int64_t* g = geometry;
  w.key_cache = {key_cache, g[0], g[1], g[2], g[3], g[4], g[5], g[10], reinterpret_cast<const float*>(g[11])};
  const int64_t value_storage = g[10] == AS_PAIRED_KEYS ? int64_t(AS_PAIRED_VALUES) : g[10];
  w.value_cache = {value_cache, g[0], g[1], g[6], g[7], g[8], g[9], value_storage,
                   reinterpret_cast<const float*>(g[12])};
  w.key_cache.rows = {reinterpret_cast<float*>(g[13]), g[14], g[15], g[16], 1};
  w.value_cache.rows = {reinterpret_cast<float*>(g[17]), g[18], g[19], g[20], 1};
}

int32_t cache_write(const void* key, const void* value, void* key_cache, void* value_cache,
                    const int64_t* slots, const int64_t* geometry, int64_t tokens, int64_t k_heads,
                    int64_t dim, int64_t k_row, int64_t k_head, int64_t v_row, int64_t v_head,
                    int32_t dtype) {
  TokenWork w{};
  w.key = {const_cast<void*>(key), k_heads, k_row, k_head};  // not changed: no norm, no rotation
  w.value = {const_cast<void*>(value), k_heads, v_row, v_head};
  w.slots = slots;
  w.dim = dim;
  set_caches(w, key_cache, value_cache, geometry);
  return do_tokens(w, tokens, dtype);
}

int32_t rotary_cache_write(void* query, void* key, const void* value, const int64_t* positions,
                           const float* cos_sin, void* key_cache, void* value_cache,
                           const int64_t* slots, const int64_t* geometry, const void* query_weight,
                           const void* key_weight, int64_t tokens, int64_t q_heads, int64_t k_heads,
                           int64_t dim, int64_t q_row, int64_t q_head, int64_t k_row, int64_t k_head,
                           int64_t v_row, int64_t v_head, int64_t num_positions, int64_t rotary_dim,
                           int64_t cos_sin_stride, float eps, float offset, int32_t interleaved,
                           int32_t dtype, int32_t weight_dtype) {
  TokenWork w{};
  w.query = {query, q_heads, q_row, q_head};
  w.key = {key, k_heads, k_row, k_head};
  w.value = {const_cast<void*>(value), k_heads, v_row, v_head};
  w.positions = positions;
  w.cos_sin = cos_sin;
  w.num_positions = num_positions;
  w.cos_sin_stride = cos_sin_stride;
  w.rotary_dim = rotary_dim;
  w.slots = slots;
  float* weights = static_cast<float*>(scratch(SCRATCH_A, size_t(2 * dim) * sizeof(float)));
  widen_weight(weights, query_weight, dim, offset, weight_dtype);
  widen_weight(weights + dim, key_weight, dim, offset, weight_dtype);
  w.query_weight = query_weight == nullptr ? nullptr : weights;
  w.key_weight = key_weight == nullptr ? nullptr : weights + dim;
  w.eps = eps;
  w.dim = dim;
  w.interleaved = interleaved != 0;
  set_caches(w, key_cache, value_cache, geometry);
  return do_tokens(w, tokens, dtype);
}

}  // namespace
}  // namespace headrace::HR_ISA
