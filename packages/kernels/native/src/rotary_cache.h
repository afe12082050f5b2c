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
  AS_COMPUTED = 0, AS_INT8 = 1, AS_E4M3 = 2, AS_E5M2 = 3, AS_PAIRED_KEYS = 4, AS_PAIRED_VALUES = 5
};
constexpr int64_t PAIRED_KEYS = 16;  // side by side in a paired cache

// A cache [N, S, Hk, D] with any strides, in elements.
struct Cache {
  void* data;
  int64_t blocks, block_size;
  int64_t block_stride, token_stride, head_stride, dim_stride;
  int64_t storage;
  const float* scales;  // [Hk], what a stored 1 stands for; null = 1
};

inline float scale_of(const Cache& cache, int64_t head) {
  return cache.scales == nullptr ? 1.0f : cache.scales[head];
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

// One token of keys [S / 16][D / 2][16][2] or of values [S / 2][D][2].
template <class T>
inline void store_paired(const Cache& cache, int64_t slot, int64_t head, const T* x, int64_t dim) {
  const int64_t offset = slot % cache.block_size;
  T* to = static_cast<T*>(cache.data) + slot / cache.block_size * cache.block_stride + head * cache.head_stride;
  if (cache.storage == AS_PAIRED_KEYS) {
    to += offset / PAIRED_KEYS * PAIRED_KEYS * dim + offset % PAIRED_KEYS * 2;
    for (int64_t d = 0; d < dim; d += 2, to += 2 * PAIRED_KEYS) __builtin_memcpy(to, x + d, 2 * sizeof(T));
  } else {
    to += offset / 2 * 2 * dim + offset % 2;
    for (int64_t d = 0; d < dim; ++d) to[2 * d] = x[d];
  }
}

template <class T> inline void store_token(const Cache& cache, int64_t slot, int64_t head, const T* x, int64_t dim) {
  if (cache.storage >= AS_PAIRED_KEYS) return store_paired(cache, slot, head, x, dim);
  const int64_t at = slot / cache.block_size * cache.block_stride +
                     slot % cache.block_size * cache.token_stride + head * cache.head_stride;
  const float scale = scale_of(cache, head);
  switch (cache.storage) {
    case AS_INT8: return store_bytes(static_cast<int8_t*>(cache.data) + at, cache.dim_stride, x, dim, scale);
    case AS_E4M3: return store_bytes(static_cast<e4m3*>(cache.data) + at, cache.dim_stride, x, dim, scale);
    case AS_E5M2: return store_bytes(static_cast<e5m2*>(cache.data) + at, cache.dim_stride, x, dim, scale);
  }
  T* to = static_cast<T*>(cache.data) + at;
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
  const void* query_weight;
  const void* key_weight;
  float eps, offset;
  int64_t dim;
  bool interleaved;
};

template <class T> inline T* head_of(const Heads& h, int64_t token, int64_t head) {
  return static_cast<T*>(h.data) + token * h.row_stride + head * h.head_stride;
}

template <class T, class WT>
inline void norm_and_rotate(const TokenWork& w, T* x, const void* weight, const float* cos) {
  if (weight != nullptr) rms_row(x, x, static_cast<const WT*>(weight), w.dim, w.eps, w.offset);
  if (cos != nullptr) {
    const int64_t half = w.rotary_dim / 2;
    rotate_row(x, x, cos, cos + half, half, w.interleaved);
  }
}

template <class T, class WT> inline int32_t do_token(const TokenWork& w, int64_t t) {
  const float* cos = nullptr;
  if (w.cos_sin != nullptr) {
    const int64_t p = w.positions[t];
    if (p < 0 || p >= w.num_positions) return BAD_INDEX;
    cos = w.cos_sin + p * w.cos_sin_stride;
  }
  for (int64_t h = 0; h < w.query.heads; ++h) {
    norm_and_rotate<T, WT>(w, head_of<T>(w.query, t, h), w.query_weight, cos);
  }
  const int64_t slot = w.slots == nullptr ? -1 : w.slots[t];
  if (slot >= w.key_cache.blocks * w.key_cache.block_size && w.slots != nullptr) return BAD_INDEX;
  for (int64_t h = 0; h < w.key.heads; ++h) {
    T* key = head_of<T>(w.key, t, h);
    norm_and_rotate<T, WT>(w, key, w.key_weight, cos);
    if (slot < 0) continue;
    store_token(w.key_cache, slot, h, key, w.dim);
    store_token(w.value_cache, slot, h, head_of<T>(w.value, t, h), w.dim);
  }
  return OK;
}

int32_t do_tokens(const TokenWork& w, int64_t tokens, int32_t dtype, int32_t weight_dtype) {
  int32_t status = OK;
  const int64_t work = tokens * (w.query.heads + 2 * w.key.heads) * w.dim / 4;
  with_weight_dtype(dtype, weight_dtype, [&](auto* t, auto* wt) {
    using T = typename pointee<decltype(t)>::type;
    using WT = typename pointee<decltype(wt)>::type;
    parallel_ranges(tokens, work, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (do_token<T, WT>(w, i) != OK) __atomic_store_n(&status, int32_t(BAD_INDEX), __ATOMIC_RELAXED);
      }
    });
  });
  return status;
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
  return do_tokens(w, tokens, dtype, dtype);
}

// geometry: blocks, block_size, then block, token, head and dim stride of keys, then of values,
// the storage of both, addresses of the scales of keys and of values (0 = none).
inline void set_caches(TokenWork& w, void* key_cache, void* value_cache, const int64_t* geometry) {
  const int64_t* g = geometry;
  w.key_cache = {key_cache, g[0], g[1], g[2], g[3], g[4], g[5], g[10], reinterpret_cast<const float*>(g[11])};
  const int64_t value_storage = g[10] == AS_PAIRED_KEYS ? int64_t(AS_PAIRED_VALUES) : g[10];
  w.value_cache = {value_cache, g[0], g[1], g[6], g[7], g[8], g[9], value_storage,
                   reinterpret_cast<const float*>(g[12])};
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
  return do_tokens(w, tokens, dtype, dtype);
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
  w.query_weight = query_weight;
  w.key_weight = key_weight;
  w.eps = eps;
  w.offset = offset;
  w.dim = dim;
  w.interleaved = interleaved != 0;
  set_caches(w, key_cache, value_cache, geometry);
  return do_tokens(w, tokens, dtype, weight_dtype);
}

}  // namespace
}  // namespace headrace::HR_ISA
