// Attention over a paired cache by AMX tiles: keys lie as tiles read them, 16 of them with a pair of dimensions to
// a line. Values are copied first: a tile takes 32 keys, a block of the cache may have 16, and keys that a
// row does not see must be zeros. With few rows that goes 64 keys at a time, which stay in the first cache.

#if defined(HR_AMX)

namespace headrace::HR_ISA {
namespace {
namespace paged {

// Groups of 16 keys, each where it is; what is behind `ahead` is fetched meanwhile, null = nothing.
struct KeyColumns {
  const float* const* groups;
  const float* const* ahead;
  static constexpr int64_t apart = W;
  const float* at(int v) const { return groups[v]; }
  void fetch(int v, int64_t word) const {
    if (ahead == nullptr) return;
    for (int64_t i = 0; i < LINES; ++i) __builtin_prefetch(ahead[v] + (word + i) * W);
  }
};

// A unit over a paired cache; D is a multiple of 16, the block size too.
struct PairedUnit : PairedRows {
  bool once;       // few rows: values are copied, used and forgotten
  int64_t apart;   // from a row of copied values to the next: other sets of the caches
  int64_t lines;   // of a tile
  float* values;

  PairedUnit(const Attention& g, const Tile& t, int64_t kv_head, bool last_head)
      : PairedRows(g, t, kv_head, last_head) {
    once = rows <= BLOCK;
    apart = g.dim + W;
    lines = min_of(rows, LINES);
    values = take_scratch((once ? KEYS : PART) / STEP * apart);
  }

  // Copies a row of two keys' values as it is; fetches the row `next` meanwhile.
  void copy_row(const float* value, const float* next, float* to) const {
    for (int64_t d = 0; d < g.dim; d += W) {
      __builtin_prefetch(next + d);
      st(to + d, ld(value + d));
    }
  }

  // The same with zeros for the keys that `mask` lacks; notes bad values.
  void copy_masked(const float* value, const float* next, uint32_t mask, float* to, Pair::Bad& bad) const {
    for (int64_t d = 0; d < g.dim; d += W) {
      __builtin_prefetch(next + d);
      const __m512i x = _mm512_and_si512(_mm512_loadu_si512(value + d), _mm512_set1_epi32(int(mask)));
      bad = _mm512_max_epu16(bad, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)));
      _mm512_storeu_si512(to + d, x);
    }
  }

  // Whether all rows see the same keys: then none has weight 0 for another's.
  bool alike() const { return t.count == 1 || t.common; }

  // Copies the values that `own` has of a tile's blocks in which there are keys of `seen`; zeros for the others.
  // False if any is infinite or NaN, which nobody asks of rows that are alike.
  bool copy_values(int tile, Span seen, Span own, float* to) const {
    Pair::Bad bad{};
    const int origin = tile * KEYS / STEP;
    const int from = int(max_of(first_step(seen.from), origin));
    const int end = int(min_of(end_step(seen.to), origin + KEYS / STEP));
    for (int k = from; k < end; ++k) {
      const bool low = 2 * k >= own.from && 2 * k < own.to, high = 2 * k + 1 >= own.from && 2 * k + 1 < own.to;
      float* const row = to + (k - origin) * apart;
      if (low && high && alike()) {
        copy_row(value_rows[k], value_rows[k + ROWS_AHEAD], row);
      } else if (low || high) {
        const uint32_t mask = (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
        copy_masked(value_rows[k], value_rows[k + ROWS_AHEAD], mask, row, bad);
      } else {
        __builtin_memset(row, 0, size_t(g.dim) * sizeof(float));
      }
    }
    return !Pair::any(bad);
  }

  void score(int64_t r, int64_t n, int tile, Span seen) const {
    const float* ahead[GROUPS];
    if (r == 0) find_ahead(tile, seen, ahead);
    const int from = int(max_of(seen.from - tile * KEYS, 0)) / W;
    const int to = int(ceil_div(min_of(seen.to - tile * KEYS, KEYS), W));
    const KeyColumns keys{key_groups + tile * GROUPS + from, r == 0 ? ahead + from : nullptr};
    tile_product(n, lines, to - from, {q + r * q_apart, q_apart}, keys, words, s + tile * KEYS + from * W, LINE, false);
  }

  // Outputs of rows [r, r + n) (+)= weights times copied values of the keys `seen`, which begin at step `origin`.
  void weigh(int64_t r, int64_t n, const float* weights, Span seen, int origin, const State& state, bool more) const {
    const int64_t lanes = lanes_of(g.value_dim);
    const int from = first_step(seen.from);
    const Columns columns{values + (from - origin) * apart, apart};
    tile_product(n, lines, int(g.dim / W), {weights + from, LINE}, columns, end_step(seen.to) - from,
                 state.acc + r * lanes, lanes, more);
  }

  // Tile by tile, copied as it comes. A row whose unseen keys are not finite gets zeros for them: weight 0 times
  // infinity is not 0.
  void weigh_tiles(int64_t r, int64_t n, int64_t base, Span seen, const State& state) const {
    const int first = seen.from / KEYS;
    for (int tile = first; tile * KEYS < seen.to; ++tile) {
      const Span part{int(max_of(seen.from, tile * KEYS)), int(min_of(seen.to, (tile + 1) * KEYS))};
      const int origin = tile * KEYS / STEP;
      if (copy_values(tile, seen, seen, values) || alike()) {
        weigh(r, n, s, part, origin, state, tile > first);
        continue;
      }
      for (int64_t i = 0; i < n; ++i) {
        copy_values(tile, seen, span(r + i, base), values);
        weigh(r + i, 1, s + i * LINE, part, origin, state, tile > first);
      }
    }
  }

  // The state of all rows after one partition alone.
  void visit(int64_t partition, const State& state) {
    const int64_t base = partition * PART;
    const Span all = span(0, rows, base);
    find_groups(partition, all);
    if (!all.empty()) find_rows(all);
    const ShapesFor<TILED> shapes(rows);
    bool finite = true;
    for (int tile = all.from / KEYS; !once && tile * KEYS < all.to; ++tile) {
      finite &= copy_values(tile, all, all, values + tile * (KEYS / STEP) * apart);
    }
    for (int64_t r = 0; r < rows; r += BLOCK) {
      const int64_t n = min_of(BLOCK, rows - r);
      const Span seen = span(r, n, base);
      for (int tile = seen.from / KEYS; tile * KEYS < seen.to; ++tile) score(r, n, tile, seen);
      soften_all(r, n, base, seen, state);
      if (seen.empty()) continue;
      if (once || !finite) {
        weigh_tiles(r, n, base, seen, state);
      } else {
        weigh(r, n, s, seen, 0, state, false);
      }
    }
  }
};

}  // namespace paged
}  // namespace
}  // namespace headrace::HR_ISA

#endif
