// Attention over the paged cache: a call is cut into units, which are visited and merged.
// The arithmetic is that of attention_units.h.
//
// Requests that decode and whose tables begin with the same blocks (a prefix that they share) are
// visited together, a partition at a time: what is read of the cache serves all of them. A row's
// state after a partition is the same in whichever company it is computed, so this changes no bit.

namespace headrace::HR_ISA {
namespace {
namespace paged {

// All partitions of a unit, and the result.
template <class Unit> inline void run_all(Unit& unit) {
  const Tile& t = unit.t;
  if (t.end - t.begin == 1 && unit.g.sinks == nullptr && unit.g.prefix == 0) {  // nothing to merge: most encoders' sequences
    unit.visit(t.begin, unit.total);
  } else {
    for (int64_t r = 0; r < unit.rows; ++r) begin_row<typename Unit::TQ>(unit.g, t, unit.total, r, unit.kv_head);
    for (int64_t partition = t.begin; partition < t.end; ++partition) {
      unit.visit(partition, unit.part);
      for (int64_t r = 0; r < unit.rows; ++r) merge_row(unit.g, unit.total, unit.part, r);
    }
  }
  for (int64_t r = 0; r < unit.rows; ++r) {
    finish_row<typename Unit::TQ>(unit.g, t, unit.total, r, unit.kv_head);
  }
}

// Partitions [begin, end) into their places in `partial`.
template <class Unit> inline void run_some(Unit& unit, int64_t begin, int64_t end, float* partial) {
  const Tile& t = unit.t;
  const int64_t rows = unit.rows, size = state_floats(rows, unit.g.value_dim);
  for (int64_t partition = begin; partition < end; ++partition) {
    const int64_t place = unit.kv_head * (t.end - t.begin) + partition - t.begin;
    unit.visit(partition, state_at(partial + t.partial + place * size, rows, unit.g.value_dim));
  }
}

// One partition that several requests share; each request's state goes to its own tile's place.
template <class Unit> inline void run_common(Unit& unit, const Tile* own, float* partial) {
  const int64_t lanes = lanes_of(unit.g.value_dim), size = state_floats(unit.group, unit.g.value_dim);
  unit.visit(unit.t.begin, unit.part);
  for (int64_t i = 0; i < unit.t.count; ++i) {
    const int64_t place = unit.kv_head * (own[i].end - own[i].begin) + unit.t.begin - own[i].begin;
    const State to = state_at(partial + own[i].partial + place * size, unit.group, unit.g.value_dim);
    const int64_t from = i * unit.group;
    __builtin_memcpy(to.acc, unit.part.acc + from * lanes, size_t(unit.group * lanes) * sizeof(float));
    __builtin_memcpy(to.best, unit.part.best + from, size_t(unit.group) * sizeof(float));
    __builtin_memcpy(to.sum, unit.part.sum + from, size_t(unit.group) * sizeof(float));
  }
}

// What units have left of a tile, merged in order.
template <class TQ>
inline void merge_tile(const Attention& g, const Tile& t, int64_t kv_head, float* partial) {
  const int64_t group = g.q_heads / g.kv_heads, rows = t.count * group;
  const int64_t size = state_floats(rows, g.value_dim), count = t.end - t.begin;
  const State total = state_at(static_cast<float*>(scratch(SCRATCH_TASK, size_t(size) * sizeof(float))), rows, g.value_dim);
  for (int64_t r = 0; r < rows; ++r) {
    begin_row<TQ>(g, t, total, r, kv_head);
    for (int64_t i = 0; i < count; ++i) {
      merge_row(g, total, state_at(partial + t.partial + (kv_head * count + i) * size, rows, g.value_dim), r);
    }
    finish_row<TQ>(g, t, total, r, kv_head);
  }
}

// --- the call ---------------------------------------------------------------------------------

// A partition that the requests of the tiles [tile, tile + count) share.
struct Common { int32_t tile, count, partition; };

struct Plan {
  Tile* tiles;
  Common* commons;
  int64_t count, num_commons, units, work, partial;
  int32_t* unit_tile;   // [units]: which tile; or which of the commons, as -1 - i
  int32_t* unit_piece;  // [units]: which piece of its own partitions
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
  Tile t{};
  t.request = int32_t(request);
  t.first = int32_t(first);
  t.count = int32_t(count);
  const int64_t position = position_of(g, t), context = context_of(g, request);
  const int64_t row = g.cu_seqlens_q[request] + first;
  int64_t last = end_seen(g, position + count - 1, row + count - 1, context);
  for (int64_t i = 0; g.falls && i < count; ++i) last = max_of(last, end_seen(g, position + i, row + i, context));
  if (!g.causal) last = g.window > 0 ? min_of(last + g.window - 1, context) : context;
  t.begin = int32_t(first_seen(g, position) / PART);
  t.end = int32_t(max_of(t.begin, ceil_div(max_of(last, 0), PART)));
  t.own = t.begin;
  return t;
}

// Leading partitions of two requests that are the same blocks, and whole.
inline int64_t count_alike(const Attention& g, const Tile& a, const Tile& b) {
  if (g.block_table == nullptr || !g.visits_together || g.last_keys != nullptr || g.key_counts != nullptr) return 0;
  const bool decode = a.count == 1 && b.count == 1 && a.first == 0 && b.first == 0;
  if (!decode || b.request != a.request + 1 || g.window > 0 || g.chunk > 0 || !g.causal) return 0;
  if (PART % g.keys.block_size != 0) return 0;
  if (g.cu_seqlens_q[a.request + 1] - g.cu_seqlens_q[a.request] != 1) return 0;
  if (g.cu_seqlens_q[b.request + 1] - g.cu_seqlens_q[b.request] != 1) return 0;
  const int64_t columns = PART / g.keys.block_size;
  const int64_t most = min_of(min_of(g.seq_lens[a.request], g.seq_lens[b.request]) / PART, g.table_width / columns);
  const int32_t* const first = g.block_table + a.request * g.table_stride;
  const int32_t* const second = g.block_table + b.request * g.table_stride;
  int64_t alike = 0;
  while (alike < most && __builtin_memcmp(first + alike * columns, second + alike * columns,
                                          size_t(columns) * sizeof(int32_t)) == 0) {
    ++alike;
  }
  return alike;
}

// f(first tile, tiles, partition) for all that tiles share, at most `per_tile` of them at once.
template <class F> inline void over_commons(const Plan& plan, int64_t per_tile, const F& f) {
  int64_t deepest = 0;
  for (int64_t i = 0; i < plan.count; ++i) deepest = max_of(deepest, plan.tiles[i].alike);
  for (int64_t p = 0; p < deepest; ++p) {
    for (int64_t i = 0, end; i < plan.count; i = end) {
      for (end = i + 1; end < plan.count && plan.tiles[end].alike > p && end - i < per_tile;) ++end;
      if (end < plan.count && plan.tiles[end].alike > p) {  // cut, not ended: nobody may be left alone
        if (end + 1 == plan.count || plan.tiles[end + 1].alike <= p) ++end;
      }
      if (end - i > 1) f(i, end - i, p);
    }
  }
}

inline void find_commons(const Attention& g, Plan& plan, int64_t per_tile) {
  for (int64_t i = 1; i < plan.count; ++i) {
    plan.tiles[i].alike = int32_t(count_alike(g, plan.tiles[i - 1], plan.tiles[i]));
  }
  for (int64_t i = 0; i < plan.count; ++i) {
    const int32_t after = i + 1 < plan.count ? plan.tiles[i + 1].alike : 0;
    plan.tiles[i].own = max_of(plan.tiles[i].begin, max_of(plan.tiles[i].alike, after));
    plan.tiles[i].kept = plan.tiles[i].own > plan.tiles[i].begin;
  }
  over_commons(plan, per_tile, [&](int64_t tile, int64_t count, int64_t partition) {
    plan.commons[plan.num_commons++] = {int32_t(tile), int32_t(count), int32_t(partition)};
  });
}

// Cuts the requests into tiles.
inline bool make_tiles(const Attention& g, Plan& plan, int64_t per_tile) {
  plan.count = count_tiles(g, per_tile);
  if (plan.count < 0) return false;
  int64_t partitions = 0, at = 0;
  for (int64_t b = 0; b < g.requests; ++b) partitions += max_of(0, context_of(g, b)) / PART;
  const size_t tile_bytes = size_t(plan.count + 1) * sizeof(Tile), common_bytes = size_t(partitions) * sizeof(Common);
  plan.tiles = static_cast<Tile*>(scratch(SCRATCH_A, tile_bytes + common_bytes));
  plan.commons = reinterpret_cast<Common*>(plan.tiles + plan.count + 1);
  for (int64_t b = 0; b < g.requests; ++b) {
    const int64_t length = g.cu_seqlens_q[b + 1] - g.cu_seqlens_q[b];
    for (int64_t first = 0; first < length; first += per_tile) {
      plan.tiles[at++] = make_tile(g, b, first, min_of(per_tile, length - first));
    }
    const int64_t reach = max_of(g.window, g.chunk), context = context_of(g, b);
    plan.work += length * (reach > 0 ? min_of(reach, context) : context);
  }
  plan.work *= g.q_heads * g.dim / 16;
  find_commons(g, plan, per_tile);
  return true;
}

// Cuts the call into tasks: those of few rows have up to an eighth of a thread's share of keys.
inline bool make_plan(const Attention& g, Plan& plan) {
  const int64_t group = g.q_heads / g.kv_heads, per_tile = max_of(1, TASK_ROWS / group);
  plan = {};
  if (!make_tiles(g, plan, per_tile)) return false;
  int64_t parts = plan.num_commons, most = 1;
  bool few_rows = true;
  for (int64_t i = 0; i < plan.count; ++i) {
    const Tile& t = plan.tiles[i];
    parts += t.end - t.own;
    most = max_of(most, t.end - t.own);
    few_rows = few_rows && t.count * group <= BLOCK_ROWS;
  }
  plan.chunk = max_of(1, parts * g.kv_heads / (8 * int64_t(pool_size())));
  plan.heads = few_rows ? max_of(1, min_of(plan.chunk / min_of(plan.chunk, most), g.kv_heads)) : 1;
  if (plan.num_commons > 0) plan.heads = min_of(plan.heads, max_of(1, g.kv_heads / 4));  // those are long
  plan.units = plan.num_commons;
  for (int64_t i = 0; i < plan.count; ++i) {
    Tile& t = plan.tiles[i];
    t.pieces = int32_t(ceil_div(t.end - t.own, plan.chunk));
    if (!t.kept) t.pieces = max_of(1, t.pieces);  // a tile that sees nothing is written too
    t.kept = t.kept || t.pieces > 1;
    t.partial = plan.partial;
    if (t.kept) plan.partial += (t.end - t.begin) * g.kv_heads * state_floats(t.count * group, g.value_dim);
    plan.units += t.pieces;
  }
  plan.unit_tile = static_cast<int32_t*>(scratch(SCRATCH_B, size_t(2 * plan.units + 1) * sizeof(int32_t)));
  plan.unit_piece = plan.unit_tile + plan.units;
  int64_t at = 0;
  for (; at < plan.num_commons; ++at) plan.unit_tile[at] = int32_t(-1 - at);
  for (int64_t i = plan.count - 1; i >= 0; --i) {  // late tiles of a prefill see most keys: they go first
    for (int32_t piece = 0; piece < plan.tiles[i].pieces; ++piece, ++at) {
      plan.unit_tile[at] = int32_t(i);
      plan.unit_piece[at] = piece;
    }
  }
  return true;
}

template <class Unit>
inline int32_t run_common_unit(const Attention& g, const Plan& plan, const Common& c, int64_t kv_head,
                               bool last_head, float* partial) {
  const Tile* own = plan.tiles + c.tile;
  Tile t{};
  t.request = own->request;
  t.count = c.count;
  t.begin = c.partition;
  t.end = c.partition + 1;
  t.common = true;
  Unit unit(g, t, kv_head, last_head);
  run_common(unit, own, partial);
  return unit.status;
}

template <class Unit>
inline int32_t run_unit(const Attention& g, const Plan& plan, int64_t i, int64_t kv_head, bool last_head,
                        float* partial) {
  const int64_t which = plan.unit_tile[i];
  if (which < 0) return run_common_unit<Unit>(g, plan, plan.commons[-1 - which], kv_head, last_head, partial);
  const Tile& t = plan.tiles[which];
  Unit unit(g, t, kv_head, last_head);
  if (!t.kept) {
    run_all(unit);
  } else {
    const int64_t begin = t.own + plan.unit_piece[i] * plan.chunk;
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
      if (t.kept) merge_tile<TQ>(g, t, task % g.kv_heads, partial);
    });
  }
  const int64_t covered = g.requests > 0 ? g.cu_seqlens_q[g.requests] : 0, row = g.q_heads * g.value_dim;
  if (covered < g.tokens) {
    __builtin_memset(static_cast<TQ*>(g.out) + covered * row, 0, size_t((g.tokens - covered) * row) * sizeof(TQ));
    for (int64_t i = covered * g.q_heads; g.lse != nullptr && i < g.tokens * g.q_heads; ++i) g.lse[i] = -__builtin_inff();
  }
  return status;
}

}  // namespace paged

namespace paged {

// Whether the last keys, or the counts of keys, of any request fall from one of its tokens to the next.
inline bool falling(const int32_t* last_keys, const int32_t* cu_seqlens_q, int64_t requests, int64_t tokens) {
  for (int64_t b = 0; last_keys != nullptr && b < requests; ++b) {
    const int64_t end = min_of(cu_seqlens_q[b + 1], tokens);
    for (int64_t i = max_of(cu_seqlens_q[b], 0) + 1; i < end; ++i) {
      if (last_keys[i] < last_keys[i - 1]) return true;
    }
  }
  return false;
}

}  // namespace paged

// geometry: as for cache_write. lse: [tokens, q_heads], written where it is not null.
int32_t paged_attention(void* out, const void* query, const void* key_cache, const void* value_cache,
                        const int32_t* block_table, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                        const float* sinks, const float* slopes, const float* temperatures,
                        const void* prefix_keys, const void* prefix_values, const int32_t* last_keys,
                        const int32_t* key_counts, float* lse, const int64_t* geometry,
                        int64_t tokens, int64_t requests, int64_t q_heads, int64_t kv_heads, int64_t dim,
                        int64_t q_row, int64_t q_head, int64_t table_stride, int64_t table_width,
                        int64_t window, int64_t chunk, int64_t num_temperatures, int64_t prefix, float scale,
                        float soft_cap, int32_t causal, int32_t slope_roots, int32_t dtype) {
  TokenWork caches{};
  set_caches(caches, const_cast<void*>(key_cache), const_cast<void*>(value_cache), geometry);
  const paged::Attention g{out, query, block_table, cu_seqlens_q, seq_lens, sinks, caches.key_cache,
                           caches.value_cache, tokens, requests, q_heads, kv_heads, dim, dim, q_row, q_head,
                           table_stride, table_width, scale, soft_cap, window, chunk, causal != 0, slopes, slope_roots != 0,
                           {nullptr, 0}, nullptr, 0, 0, prefix_keys, prefix_values, prefix, temperatures, num_temperatures, true, last_keys,
                           paged::falling(last_keys != nullptr ? last_keys : key_counts, cu_seqlens_q, requests, tokens),
                           key_counts, lse};
  paged::Plan plan;
  if (!paged::make_plan(g, plan)) return BAD_LENGTHS;
  int32_t status = OK;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    switch (g.keys.storage) {
      case AS_INT8: status = paged::run<paged::PlainUnit<T, int8_t>>(g, plan); break;
      case AS_E4M3: status = paged::run<paged::PlainUnit<T, e4m3>>(g, plan); break;
      case AS_E5M2: status = paged::run<paged::PlainUnit<T, e5m2>>(g, plan); break;
      case AS_INT4: status = paged::run<paged::PlainUnit<T, nibbles>>(g, plan); break;
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
