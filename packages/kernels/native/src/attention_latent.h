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

int32_t latent_cache_write(const void* latent, const void* rope_key, void* cache, const int64_t* slots,
                           int64_t tokens, int64_t latent_dim, int64_t rope_dim, int64_t latent_row,
                           int64_t rope_row, int64_t blocks, int64_t block_size, int64_t block_stride,
                           int64_t token_stride, int32_t dtype) {
  const int64_t item = dtype == F32 ? 4 : 2;
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
      to += (slot / block_size * block_stride + slot % block_size * token_stride) * item;
      __builtin_memcpy(to, first + t * latent_row * item, size_t(latent_dim * item));
      __builtin_memcpy(to + latent_dim * item, second + t * rope_row * item, size_t(rope_dim * item));
    }
  });
  return status;
}

int32_t latent_attention(void* out, const void* query, const void* rope_query, const void* cache,
                         const int32_t* block_table, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                         int64_t tokens, int64_t requests, int64_t q_heads, int64_t dim, int64_t value_dim,
                         int64_t q_row, int64_t q_head, int64_t rope_row, int64_t rope_head, int64_t blocks,
                         int64_t block_size, int64_t block_stride, int64_t token_stride, int64_t table_stride,
                         int64_t table_width, float scale, int32_t dtype) {
  const Cache both{const_cast<void*>(cache), blocks, block_size, block_stride, token_stride, 0, 1,
                   AS_COMPUTED, nullptr};
  paged::Attention g{out, query, block_table, cu_seqlens_q, seq_lens, nullptr, both, both, tokens, requests,
                     q_heads, 1, dim, value_dim, q_row, q_head, table_stride, table_width, scale, 0.0f, 0, 0,
                     true, nullptr, false, {nullptr, 0}, rope_query, rope_row, rope_head, nullptr, nullptr, 0};
  g.kv_heads = head_groups(g);
  paged::Plan plan;
  if (!paged::make_plan(g, plan)) return BAD_LENGTHS;
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    status = paged::run<paged::PlainUnit<T, T>>(g, plan);
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA
