// Latent attention (DeepSeek-AI 2024, arXiv:2405.04434), absorbed: one vector for each token is the key
// of all heads, and its beginning their value. The cache is [N, S, R + P].
//
// It is attention over a paged cache with one kv head whose keys and values lie at the same place. All
// query heads would make one unit, which keeps a single stream on a single thread: heads are cut into
// groups, as if kv heads lay on top of each other. Rows do not know of their unit, so this changes no
// bit.

namespace headrace::HR_ISA {
namespace {

// Groups of heads: as many as it takes for every thread to have work, of no fewer rows than share
// well what is packed.
inline int64_t head_groups(const paged::Attention& g) {
  int64_t units = 0;
  for (int64_t b = 0; b < g.requests; ++b) {
    const int64_t length = max_of(0, g.cu_seqlens_q[b + 1] - g.cu_seqlens_q[b]);
    units += ceil_div(max_of(0, g.seq_lens[b]), paged::PART) * ceil_div(length * g.q_heads, paged::TASK_ROWS);
  }
  int64_t groups = 1;
  for (int64_t next = 2; next * paged::BLOCK_ROWS <= g.q_heads; ++next) {
    if (units * groups >= 2 * pool_size()) break;
    if (g.q_heads % next == 0) groups = next;
  }
  return groups;
}

// A vector in bytes of storage TC, from its two parts in T.
template <class TC, class T>
inline void store_latent(char* to, const char* first, int64_t latent_dim, const char* second, int64_t rope_dim,
                         float scale) {
  TC* const bytes = reinterpret_cast<TC*>(to);
  store_bytes(bytes, 1, reinterpret_cast<const T*>(first), latent_dim, scale);
  store_bytes(bytes + latent_dim, 1, reinterpret_cast<const T*>(second), rope_dim, scale);
}

// A vector whose two parts have a scale each, side by side.
template <class T>
inline void store_latent_row(char* to, int64_t storage, const char* first, int64_t latent_dim, const char* second,
                             int64_t rope_dim, float* scales) {
  store_row(to, storage, reinterpret_cast<const T*>(first), latent_dim, scales);
  char* const rest = to + (storage == AS_INT4 ? latent_dim / 2 : latent_dim);
  store_row(rest, storage, reinterpret_cast<const T*>(second), rope_dim, scales + 1);
}

// scale: what a stored 1 stands for where the cache is of one byte, null = 1. row_scales: two for each
// token, null = none; strides of its blocks and tokens in floats.
int32_t latent_cache_write(const void* latent, const void* rope_key, void* cache, const int64_t* slots,
                           const float* scale, float* row_scales, int64_t tokens, int64_t latent_dim, int64_t rope_dim,
                           int64_t latent_row, int64_t rope_row, int64_t blocks, int64_t block_size,
                           int64_t block_stride, int64_t token_stride, int64_t scale_block, int64_t scale_token,
                           int32_t storage, int32_t dtype) {
  const int64_t item = dtype == F32 ? 4 : 2, stored = storage == AS_COMPUTED ? item : 1;
  const float divisor = scale == nullptr ? 1.0f : *scale;
  const char *first = static_cast<const char*>(latent), *second = static_cast<const char*>(rope_key);
  int32_t status = OK;
  parallel_ranges(tokens, tokens * (latent_dim + rope_dim) / 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = slots[t];
      if (slot < 0) continue;
      if (slot >= blocks * block_size) {
        __atomic_store_n(&status, int32_t(BAD_INDEX), __ATOMIC_RELAXED);
        continue;
      }
      char* to = static_cast<char*>(cache);
      to += (slot / block_size * block_stride + slot % block_size * token_stride) * stored;
      const char *own = first + t * latent_row * item, *turned = second + t * rope_row * item;
      if (storage == AS_COMPUTED) {
        __builtin_memcpy(to, own, size_t(latent_dim * item));
        __builtin_memcpy(to + latent_dim * item, turned, size_t(rope_dim * item));
        continue;
      }
      with_dtype(dtype, [&](auto* x) {
        using T = typename pointee<decltype(x)>::type;
        if (row_scales != nullptr) {
          float* const scales = row_scales + slot / block_size * scale_block + slot % block_size * scale_token;
          return store_latent_row<T>(to, storage, own, latent_dim, turned, rope_dim, scales);
        }
        switch (storage) {
          case AS_INT8: return store_latent<int8_t, T>(to, own, latent_dim, turned, rope_dim, divisor);
          case AS_E4M3: return store_latent<e4m3, T>(to, own, latent_dim, turned, rope_dim, divisor);
          default: return store_latent<e5m2, T>(to, own, latent_dim, turned, rope_dim, divisor);
        }
      });
    }
  });
  return status;
}

// Makes each token a request of its own, whose context is what was picked for it: its table names places
// of single tokens. A place is a block of one at every multiple of the distance between tokens. False if
// rows of the requests contradict each other.
inline bool single_out(paged::Attention& g, const int32_t* picked, int64_t picks) {
  const int64_t size = g.keys.block_size, apart = g.keys.block_stride / g.keys.token_stride;
  const size_t numbers = size_t(g.tokens * (picks + 3) + 1);
  int32_t* table = static_cast<int32_t*>(scratch(SCRATCH_D, numbers * sizeof(int32_t)));
  int32_t *lengths = table + g.tokens * picks, *owners = lengths + g.tokens, *starts = owners + g.tokens;
  for (int64_t t = 0; t < g.tokens; ++t) owners[t] = -1;
  for (int64_t t = 0; t <= g.tokens; ++t) starts[t] = int32_t(t);
  for (int64_t b = 0; b < g.requests; ++b) {
    const int64_t begin = g.cu_seqlens_q[b], end = g.cu_seqlens_q[b + 1];
    if (begin < 0 || end < begin || end > g.tokens) return false;
    for (int64_t t = begin; t < end; ++t) owners[t] = int32_t(b);
  }
  parallel_ranges(g.tokens, g.tokens * picks, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t *from = picked + t * picks, *blocks = g.block_table + owners[t] * g.table_stride;
      int64_t many = 0;
      for (; owners[t] >= 0 && many < picks && from[many] >= 0; ++many) {
        const int64_t column = from[many] / size, block = column < g.table_width ? blocks[column] : -1;
        const bool known = block >= 0 && block < g.keys.blocks;
        table[t * picks + many] = known ? int32_t(block * apart + from[many] % size) : -1;
      }
      lengths[t] = int32_t(many);
    }
  });
  g.block_table = table;
  g.cu_seqlens_q = starts;
  g.seq_lens = lengths;
  g.requests = g.tokens;
  g.table_stride = g.table_width = picks;
  g.keys.blocks *= apart;
  g.keys.block_size = 1;
  g.keys.block_stride = g.keys.token_stride;
  g.keys.rows.block_stride = g.keys.rows.token_stride;
  g.values = g.keys;
  g.visits_together = false;  // tokens of a prompt: their states would be larger than all else of a step
  return true;
}

// picked: [tokens, picks], null for none, with which there are no key_counts. row_scales: as for latent_cache_write.
int32_t latent_attention(void* out, const void* query, const void* rope_query, const void* cache,
                         const int32_t* block_table, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                         const int32_t* picked, const int32_t* key_counts, float* lse, const float* cache_scale, const float* row_scales, int64_t tokens, int64_t requests, int64_t q_heads, int64_t dim,
                         int64_t value_dim, int64_t q_row, int64_t q_head, int64_t rope_row, int64_t rope_head,
                         int64_t blocks, int64_t block_size, int64_t block_stride, int64_t token_stride,
                         int64_t scale_block, int64_t scale_token, int64_t table_stride, int64_t table_width,
                         int64_t picks, float scale, int32_t storage, int32_t dtype) {
  Cache both{const_cast<void*>(cache), blocks, block_size, block_stride, token_stride, 0, 1,
             storage, cache_scale, 0};
  if (row_scales != nullptr) both.rows = {const_cast<float*>(row_scales), scale_block, scale_token, 0, 2};
  paged::Attention g{out, query, block_table, cu_seqlens_q, seq_lens, nullptr, both, both, tokens, requests,
                     q_heads, 1, dim, value_dim, q_row, q_head, table_stride, table_width, scale, 0.0f, 0, 0,
                     true, nullptr, false, {nullptr, 0}, rope_query, rope_row, rope_head, nullptr, nullptr, 0};
  g.key_counts = key_counts;
  g.falls = paged::falling(key_counts, cu_seqlens_q, requests, tokens);
  g.lse = lse;
  if (picked != nullptr && !single_out(g, picked, picks)) return BAD_LENGTHS;
  g.kv_heads = head_groups(g);
  paged::Plan plan;
  if (!paged::make_plan(g, plan)) return BAD_LENGTHS;
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    switch (storage) {
      case AS_INT8: status = paged::run<paged::PlainUnit<T, int8_t>>(g, plan); break;
      case AS_E4M3: status = paged::run<paged::PlainUnit<T, e4m3>>(g, plan); break;
      case AS_E5M2: status = paged::run<paged::PlainUnit<T, e5m2>>(g, plan); break;
      case AS_INT4: status = paged::run<paged::PlainUnit<T, nibbles>>(g, plan); break;
      default: status = paged::run<paged::PlainUnit<T, T>>(g, plan);
    }
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA
