// Decode context parallelism: a rank keeps the tokens i of a sequence with i / interleave % ranks == rank, and
// its attention to them is weighed for a sum over the ranks.

namespace headrace::HR_ISA {
namespace {

struct KeyShare {
  int64_t rank, ranks, interleave;

  // Own tokens among the first `length` of a sequence.
  int64_t count(int64_t length) const {
    const int64_t cycle = ranks * interleave, rest = length % cycle - rank * interleave;
    return length / cycle * interleave + (rest < 0 ? 0 : min_of(rest, interleave));
  }

  // A slot in blocks of all ranks' tokens -> in this rank's pages; -1: the token is another one's.
  int64_t own(int64_t slot) const {
    const int64_t run = slot / interleave;
    return slot < 0 || run % ranks != rank ? -1 : run / ranks * interleave + slot % interleave;
  }
};

// own_slots [tokens] of slots; own_lens [requests] of seq_lens; counts [tokens], own keys that each token sees.
int32_t key_share(int64_t* own_slots, int32_t* own_lens, int32_t* counts, const int64_t* slots,
                  const int32_t* cu_seqlens_q, const int32_t* seq_lens, int64_t tokens, int64_t requests,
                  int64_t rank, int64_t ranks, int64_t interleave) {
  for (int64_t b = 0; b < requests; ++b) {
    const int32_t begin = cu_seqlens_q[b], end = cu_seqlens_q[b + 1];
    if (begin < 0 || end < begin || end > tokens) return BAD_LENGTHS;
  }
  const KeyShare share{rank, ranks, interleave};
  for (int64_t i = 0; i < tokens; ++i) {
    own_slots[i] = share.own(slots[i]);
    counts[i] = 0;
  }
  for (int64_t b = 0; b < requests; ++b) {
    own_lens[b] = int32_t(share.count(seq_lens[b]));
    const int64_t end = cu_seqlens_q[b + 1];
    for (int64_t i = cu_seqlens_q[b]; i < end; ++i) counts[i] = int32_t(share.count(seq_lens[b] - end + i + 1));
  }
  return OK;
}

// The share of a rank in the softmax of one row: e^lse[rank] over the sum of all, which are `apart` floats
// apart. Infinite ones and NaN are of ranks without keys.
inline float softmax_share(const float* lses, int64_t ranks, int64_t apart, int64_t rank) {
  float top = -__builtin_inff();
  for (int64_t n = 0; n < ranks; ++n) {
    const float lse = lses[n * apart];
    if (lse < __builtin_inff() && lse > top) top = lse;
  }
  float own = 0, sum = 0;
  for (int64_t n = 0; n < ranks; ++n) {
    const float lse = lses[n * apart];
    if (!(lse < __builtin_inff()) || lse == -__builtin_inff()) continue;
    float weights[W];
    st(weights, vexp(vset(lse - top)));
    sum += weights[0];
    if (n == rank) own = weights[0];
  }
  return own == 0 ? 0 : own / sum;
}

// out [ranks, rows, heads / ranks, n] float32 = x [rows, heads, n] times the share of each row and head, by lses
// [ranks, rows, heads]: a rank's heads together, as they are sent to it
void lse_correction(float* out, const void* x, const float* lses, int64_t rows, int64_t heads, int64_t n, int64_t ranks,
                    int64_t rank, int32_t dtype) {
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    const int64_t count = rows * heads, each = heads / ranks;
    parallel_ranges(count, count * (n + 16 * ranks) / 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float share = softmax_share(lses + i, ranks, count, rank);
        const T* from = static_cast<const T*>(x) + i * n;
        const int64_t row = i / heads, head = i % heads;
        float* to = out + ((head / each * rows + row) * each + head % each) * n;
        for (int64_t j = 0; j < n; j += W) {
          const vf v = share == 0 ? vzero() : vmul(ld_upto(from + j, n - j), vset(share));
          st_upto(to + j, v, n - j);
        }
      }
    });
  });
}

}  // namespace
}  // namespace headrace::HR_ISA
