// Attention in both directions within sequences that lie one after the other, without a cache.
//
// Keys and values are read where the projection left them. Units, their arithmetic and how a call is
// cut are those of the paged cache, so what is said of rows there holds here: the other sequences
// of the batch change no bit, and neither do tokens that are no keys.

namespace headrace::HR_ISA {
namespace {

inline int64_t length_of(const paged::Attention& g, int64_t b) {
  return g.cu_seqlens_q[b + 1] - g.cu_seqlens_q[b];
}

// Whether the bias reaches over the longest sequence.
inline bool bias_reaches(const paged::Attention& g) {
  if (g.bias.data == nullptr) return true;
  for (int64_t b = 0; b < g.requests; ++b) {
    if (length_of(g, b) > g.bias.reach) return false;
  }
  return true;
}

// Whether no sequence has more keys than tokens.
inline bool keys_fit(const paged::Attention& g) {
  if (g.seq_lens == nullptr) return true;
  for (int64_t b = 0; b < g.requests; ++b) {
    if (g.seq_lens[b] < 0 || g.seq_lens[b] > length_of(g, b)) return false;
  }
  return true;
}

// key_lens: [sequences], null for all of their tokens. bias: [q_heads, 2 * reach - 1], null for none.
int32_t varlen_attention(void* out, const void* query, const void* key, const void* value,
                         const int32_t* cu_seqlens, const int32_t* key_lens, const float* bias, int64_t tokens,
                         int64_t sequences, int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t q_row,
                         int64_t q_head, int64_t k_row, int64_t k_head, int64_t v_row, int64_t v_head,
                         int64_t reach, int64_t window, float scale, float soft_cap, int32_t dtype) {
  const Cache keys{const_cast<void*>(key), 1, tokens, 0, k_row, k_head, 1, AS_COMPUTED, nullptr};
  const Cache values{const_cast<void*>(value), 1, tokens, 0, v_row, v_head, 1, AS_COMPUTED, nullptr};
  const paged::Attention g{out, query, nullptr, cu_seqlens, key_lens, nullptr, keys, values, tokens, sequences,
                           q_heads, kv_heads, dim, dim, q_row, q_head, 0, 0, scale, soft_cap, window, 0, false,
                           nullptr, false, {bias, reach}, nullptr, 0, 0, nullptr, nullptr, 0};
  paged::Plan plan;
  if (!keys_fit(g) || !paged::make_plan(g, plan) || !bias_reaches(g)) return BAD_LENGTHS;
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    status = paged::run<paged::PlainUnit<T, T>>(g, plan);
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA
