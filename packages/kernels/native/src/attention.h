// Causal attention over the paged cache: a call is cut into units, which are visited and merged.
// The arithmetic is that of attention_units.h.

namespace headrace::HR_ISA {
namespace {
namespace paged {

// All partitions of a unit, and the result.
template <class Unit> inline void run_all(Unit& unit) {
  const Tile& t = unit.t;
  for (int64_t r = 0; r < unit.rows; ++r) begin_row(unit.g, unit.total, r, unit.head_of(r));
  for (int64_t partition = t.begin; partition < t.end; ++partition) {
    unit.visit(partition, unit.part);
    for (int64_t r = 0; r < unit.rows; ++r) merge_row(unit.g, unit.total, unit.part, r);
  }
  for (int64_t r = 0; r < unit.rows; ++r) {
    finish_row<typename Unit::TQ>(unit.g, t, unit.total, r, unit.kv_head);
  }
}

// Partitions [begin, end) into their places in `partial`.
template <class Unit> inline void run_some(Unit& unit, int64_t begin, int64_t end, float* partial) {
  const Tile& t = unit.t;
  const int64_t rows = unit.rows, size = state_floats(rows, unit.g.dim);
  for (int64_t partition = begin; partition < end; ++partition) {
    const int64_t place = unit.kv_head * (t.end - t.begin) + partition - t.begin;
    unit.visit(partition, state_at(partial + t.partial + place * size, rows, unit.g.dim));
  }
}

// What units have left of a tile, merged in order.
template <class TQ>
inline void merge_tile(const Attention& g, const Tile& t, int64_t kv_head, float* partial) {
  const int64_t group = g.q_heads / g.kv_heads, rows = t.count * group;
  const int64_t size = state_floats(rows, g.dim), count = t.end - t.begin;
  const State total = state_at(static_cast<float*>(scratch(SCRATCH_TASK, size_t(size) * sizeof(float))), rows, g.dim);
  for (int64_t r = 0; r < rows; ++r) {
    begin_row(g, total, r, kv_head * group + r % group);
    for (int64_t i = 0; i < count; ++i) {
      merge_row(g, total, state_at(partial + t.partial + (kv_head * count + i) * size, rows, g.dim), r);
    }
    finish_row<TQ>(g, t, total, r, kv_head);
  }
}

// --- the call ---------------------------------------------------------------------------------

struct Plan {
  Tile* tiles;
  int64_t count, units, work, partial;
  int32_t* unit_tile;   // [units]: which tile
  int32_t* unit_piece;  // [units]: which piece of its partitions
  int64_t chunk;        // partitions of a piece
  int64_t heads;        // kv heads of a task, one after the other
};

inline int64_t count_tiles(const Attention& g, int64_t per_tile) {
  int64_t tiles = 0;
  for (int64_t b = 0; b < g.requests; ++b) {
    const int64_t length = g.cu_seqlens_q[b + 1] - g.cu_seqlens_q[b];
    if (length < 0 || g.cu_seqlens_q[b] < 0 || g.cu_seqlens_q[b + 1] > g.tokens) return -1;
    tiles += ceil_div(length, per_tile);
  }
  return tiles;
}

inline Tile make_tile(const Attention& g, int64_t request, int64_t first, int64_t count) {
  Tile t{int32_t(request), int32_t(first), int32_t(count), 0, 0, 1, 0};
  const int64_t position = position_of(g, t), last = position + count;  // last: one past
  const int64_t lowest = g.window > 0 ? max_of(0, position - g.window + 1) : 0;
  t.begin = int32_t(lowest / PART);
  t.end = int32_t(max_of(t.begin, ceil_div(max_of(last, 0), PART)));
  return t;
}

// Cuts the call into tasks: those of few rows have up to an eighth of a thread's share of keys.
inline bool make_plan(const Attention& g, Plan& plan) {
  const int64_t group = g.q_heads / g.kv_heads, per_tile = max_of(1, TASK_ROWS / group);
  plan = {};
  plan.count = count_tiles(g, per_tile);
  if (plan.count < 0) return false;
  plan.tiles = static_cast<Tile*>(scratch(SCRATCH_A, size_t(plan.count + 1) * sizeof(Tile)));
  int64_t parts = 0, most = 1, at = 0;
  bool few_rows = true;
  for (int64_t b = 0; b < g.requests; ++b) {
    const int64_t length = g.cu_seqlens_q[b + 1] - g.cu_seqlens_q[b];
    for (int64_t first = 0; first < length; first += per_tile) {
      Tile& t = plan.tiles[at++];
      t = make_tile(g, b, first, min_of(per_tile, length - first));
      parts += t.end - t.begin;
      most = max_of(most, t.end - t.begin);
      few_rows = few_rows && t.count * group <= BLOCK_ROWS;
    }
    plan.work += length * (g.window > 0 ? min_of(g.window, g.seq_lens[b]) : g.seq_lens[b]);
  }
  plan.work *= g.q_heads * g.dim / 16;
  plan.chunk = max_of(1, parts * g.kv_heads / (8 * int64_t(pool_size())));
  plan.heads = few_rows ? max_of(1, min_of(plan.chunk / min_of(plan.chunk, most), g.kv_heads)) : 1;
  for (int64_t i = 0; i < plan.count; ++i) {
    Tile& t = plan.tiles[i];
    const int64_t own = t.end - t.begin;
    t.pieces = int32_t(max_of(1, ceil_div(own, plan.chunk)));
    t.partial = plan.partial;
    if (t.pieces > 1) plan.partial += own * g.kv_heads * state_floats(t.count * group, g.dim);
    plan.units += t.pieces;
  }
  plan.unit_tile = static_cast<int32_t*>(scratch(SCRATCH_B, size_t(2 * plan.units + 1) * sizeof(int32_t)));
  plan.unit_piece = plan.unit_tile + plan.units;
  at = 0;
  for (int64_t i = plan.count - 1; i >= 0; --i) {  // late tiles of a prefill see most keys: they go first
    for (int32_t piece = 0; piece < plan.tiles[i].pieces; ++piece, ++at) {
      plan.unit_tile[at] = int32_t(i);
      plan.unit_piece[at] = piece;
    }
  }
  return true;
}

template <class Unit>
inline int32_t run_unit(const Attention& g, const Plan& plan, int64_t i, int64_t kv_head, bool last_head,
                        float* partial) {
  const Tile& t = plan.tiles[plan.unit_tile[i]];
  Unit unit(g, t, kv_head, last_head);
  if (t.pieces == 1) {
    run_all(unit);
  } else {
    const int64_t begin = t.begin + plan.unit_piece[i] * plan.chunk;
    run_some(unit, begin, min_of(begin + plan.chunk, t.end), partial);
  }
  return unit.status;
}

template <class Unit>
inline int32_t run(const Attention& g, const Plan& plan) {
  using TQ = typename Unit::TQ;
  int32_t status = OK;
  float* partial = static_cast<float*>(scratch(SCRATCH_C, size_t(plan.partial + 1) * sizeof(float)));
  const int64_t tasks = ceil_div(g.kv_heads, plan.heads);  // of a unit
  parallel(plan.units * tasks, plan.work, [&](int64_t task) {
    const int64_t i = task / tasks, head = task % tasks * plan.heads;
    const int64_t end = min_of(head + plan.heads, g.kv_heads);
    for (int64_t h = head; h < end; ++h) {
      const int32_t done = run_unit<Unit>(g, plan, i, h, h + 1 == end, partial);
      if (done != OK) __atomic_store_n(&status, done, __ATOMIC_RELAXED);
    }
  });
  if (plan.partial > 0) {
    parallel(plan.count * g.kv_heads, plan.partial, [&](int64_t task) {
      const Tile& t = plan.tiles[task / g.kv_heads];
      if (t.pieces > 1) merge_tile<TQ>(g, t, task % g.kv_heads, partial);
    });
  }
  const int64_t covered = g.requests > 0 ? g.cu_seqlens_q[g.requests] : 0, row = g.q_heads * g.dim;
  if (covered < g.tokens) {
    __builtin_memset(static_cast<TQ*>(g.out) + covered * row, 0, size_t((g.tokens - covered) * row) * sizeof(TQ));
  }
  return status;
}

}  // namespace paged

// geometry: as for cache_write.
int32_t paged_attention(void* out, const void* query, const void* key_cache, const void* value_cache,
                        const int32_t* block_table, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                        const float* sinks, const int64_t* geometry, int64_t tokens, int64_t requests,
                        int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t q_row, int64_t q_head,
                        int64_t table_stride, int64_t table_width, int64_t window, float scale,
                        float soft_cap, int32_t dtype) {
  TokenWork caches{};
  set_caches(caches, const_cast<void*>(key_cache), const_cast<void*>(value_cache), geometry);
  const paged::Attention g{out, query, block_table, cu_seqlens_q, seq_lens, sinks, caches.key_cache,
                           caches.value_cache, tokens, requests, q_heads, kv_heads, dim, q_row, q_head,
                           table_stride, table_width, scale, soft_cap, window};
  paged::Plan plan;
  if (!paged::make_plan(g, plan)) return BAD_LENGTHS;
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    switch (g.keys.storage) {
      case AS_INT8: status = paged::run<paged::PlainUnit<T, int8_t>>(g, plan); break;
      case AS_E4M3: status = paged::run<paged::PlainUnit<T, e4m3>>(g, plan); break;
      case AS_E5M2: status = paged::run<paged::PlainUnit<T, e5m2>>(g, plan); break;
#if defined(HR_DOT_BF16)
      case AS_PAIRED_KEYS:
        if constexpr (sizeof(T) == sizeof(bf16)) status = paged::run<paged::PairedUnit>(g, plan);
        break;
#endif
      default: status = paged::run<paged::PlainUnit<T, T>>(g, plan);
    }
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA
