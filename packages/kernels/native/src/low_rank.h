// What adapters of low rank add to a linear layer's result (LoRA): out[t] += scale * up (down x[t]), by part
// of the layer, of the adapter in the slot that row t chose.
//
// Rows are sorted by slot, so that factors are read once for all rows of an adapter. Two phases, each on all
// threads: y = scale * down x, kept in float32; then up y, added to out and rounded once.
//
// Memory, as cpu/ops/low_rank.py fills it: down [slot][part][ranks][K], ranks and K in whole steps of
// RANK_STEP and INPUT_STEP, zeros behind the last. up [slot][part][panel][ranks][UP_PANEL], ranks in whole steps
// of UP_STEP: output features side by side, so that a step along the rank loads vectors of weights and
// broadcasts one value of y. For AMX, [ranks / 2][UP_PANEL][2].
//
// Row invariance: an element of y is W running sums along K in the lanes of one register, then one tree; one
// of the result is a running sum along the rank. Tiles, panels and threads change where a sum lives, never
// its order. AMX: see low_rank_tiles.h.

namespace headrace::HR_ISA {
namespace {

constexpr int64_t ADAPTER_ROWS = 48;  // of a task, whole tiles
constexpr int64_t WORTH_WIDENING = 3 * MAX_ROWS;  // rows for which a panel of weights is widened once

// Factors of all slots; ranks and scales are [slots][parts].
template <class T> struct Adapters {
  const T *down, *up;
  const int32_t* ranks;
  const float* scales;
  const int64_t* widths;  // outputs of each part
  int64_t slots, parts, max_rank, K;

  int64_t rank(int64_t slot, int64_t part) const { return ranks[slot * parts + part]; }
  float scale(int64_t slot, int64_t part) const { return scales[slot * parts + part]; }
  int64_t panels(int64_t part) const { return ceil_div(widths[part], UP_PANEL); }
  int64_t inputs() const { return round_up(K, INPUT_STEP); }
  int64_t all_panels() const {
    int64_t sum = 0;
    for (int64_t p = 0; p < parts; ++p) sum += panels(p);
    return sum;
  }
  // Of all parts of a slot together.
  int64_t steps(int64_t slot) const {
    int64_t sum = 0;
    for (int64_t p = 0; p < parts; ++p) sum += ceil_div(rank(slot, p), RANK_STEP);
    return sum;
  }
  // Elements of all panels of a slot and of one panel.
  int64_t up_size() const { return all_panels() * round_up(max_rank, UP_STEP) * UP_PANEL; }
  static int64_t panel_size(int64_t rank) { return round_up(rank, UP_STEP) * UP_PANEL; }
  const T* down_of(int64_t slot, int64_t part, int64_t step) const {
    return down + ((slot * parts + part) * round_up(max_rank, RANK_STEP) + step * RANK_STEP) * inputs();
  }
};

// A part, and a step or a panel of it.
struct Place { int64_t part, at; };

// The i-th of all that parts have, count(part) each.
template <class Count> inline Place place_of(int64_t i, const Count& count) {
  int64_t part = 0;
  for (int64_t n; i >= (n = count(part)); ++part) i -= n;
  return {part, i};
}

// f of so many rows, a number that the compiler knows as its argument's `value`.
template <int n> struct KnownRows { static constexpr int value = n; };
template <class F> inline void with_rows(int64_t rows, const F& f) {
  switch (rows) {
    case 1: return f(KnownRows<1>{});
    case 2: return f(KnownRows<2>{});
    case 3: return f(KnownRows<3>{});
    case 4: return f(KnownRows<4>{});
    case 5: return f(KnownRows<5>{});
    case 6: return f(KnownRows<6>{});
  }
}

// f(first, rows) for tiles of `many` rows, as even as can be.
template <class F> inline void over_tiles(int64_t many, int64_t most, const F& f) {
  const int64_t tiles = ceil_div(many, most);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = i * many / tiles;
    f(first, (i + 1) * many / tiles - first);
  }
}

// Values along K of one row and one line of `down`, multiplied.
inline vf product(const float* x, vf line, vf sum) { return vfma(ld(x), line, sum); }
#if defined(HR_DOT_BF16)
inline vf product(const bf16* x, __m512bh line, vf sum) {
  return _mm512_dpbf16_ps(sum, line, (__m512bh)_mm512_loadu_si512(x));
}
inline __m512bh line_for(const bf16*, const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
#endif
template <class T> inline vf line_for(const float*, const T* p) { return ld(p); }

// acc[r][q] += x[r] times lines[q], along one step of K.
template <int R, int Q, class A, class T>
HR_INLINE inline void down_step(const A* x, int64_t x_apart, const T* lines, int64_t apart, vf (&acc)[R][Q]) {
  HR_UNROLL for (int q = 0; q < Q; ++q) {
    const auto line = line_for(x, lines + q * apart);
    HR_UNROLL for (int r = 0; r < R; ++r) acc[r][q] = product(x + r * x_apart, line, acc[r][q]);
  }
}

// y[r][q] = scale * x[r] times lines[q], of R rows and Q lines of K values, whole steps of INPUT_STEP.
template <int R, int Q, class A, class T>
inline void down_tile(const A* x, int64_t x_apart, const T* lines, int64_t K, float scale, float* y, int64_t y_apart) {
  constexpr int64_t STEP = W * ActivationTraits<T>::STEP;
  vf acc[R][Q];
  HR_UNROLL for (int r = 0; r < R; ++r)
    HR_UNROLL for (int q = 0; q < Q; ++q) acc[r][q] = vzero();
  for (int64_t k = 0; k < K; k += STEP) down_step<R, Q>(x + k, x_apart, lines + k, K, acc);
  HR_UNROLL for (int r = 0; r < R; ++r) {
    float sums[Q];
    if constexpr (Q % 4 == 0) {
      HR_UNROLL for (int q = 0; q < Q; q += 4) hsum4(acc[r][q], acc[r][q + 1], acc[r][q + 2], acc[r][q + 3], sums + q);
    } else {
      HR_UNROLL for (int q = 0; q < Q; ++q) sums[q] = hsum(acc[r][q]);
    }
    HR_UNROLL for (int q = 0; q < Q; ++q) y[r * y_apart + q] = scale * sums[q];
  }
}

// As many lines as accumulators allow.
template <int R> constexpr int lines_at_once() { return R * 8 <= ACCUMULATORS ? 8 : R * 4 <= ACCUMULATORS ? 4 : 2; }

// A row's values where every tile reads whole steps: in A's type, zeros behind the last.
template <class A, class T> inline void copy_row(A* to, const T* from, int64_t K, int64_t padded) {
  constexpr int64_t STEP = W * int64_t(sizeof(float) / sizeof(A));
  int64_t k = 0;
  for (; k + STEP <= K; k += STEP) {
    if constexpr (sizeof(A) == sizeof(T)) {
      __builtin_memcpy(to + k, from + k, STEP * sizeof(A));
    } else {
      st(to + k, ld(from + k));
    }
  }
  for (int64_t i = k; i < padded; ++i) to[i] = A{};
  if constexpr (sizeof(A) == sizeof(T)) {
    __builtin_memcpy(to + k, from + k, size_t(K - k) * sizeof(A));
  } else if (k < K) {
    st(to + k, ldn(from + k, K - k));
  }
}

// Sorted rows of one slot that a task takes.
struct RowPiece { int64_t slot, begin, many; };

// Pieces of all used slots, and y [sorted rows][apart]: of each row the steps of its slot's parts.
struct AdapterRows {
  const Sorted& sorted;
  int32_t* pieces;  // of each used slot, how many come before; then of all
  float* y;
  int64_t apart;

  int64_t count() const { return pieces[sorted.used]; }
  RowPiece piece(int64_t i) const {
    int64_t used = 0;
    while (pieces[used + 1] <= i) ++used;
    const int64_t many = sorted.begin[used + 1] - sorted.begin[used], mine = pieces[used + 1] - pieces[used];
    const int64_t first = (i - pieces[used]) * many / mine, end = (i - pieces[used] + 1) * many / mine;
    return {sorted.expert[used], sorted.begin[used] + first, end - first};
  }
};

// Tasks into which a phase cuts each piece, `most` at most: so many that all threads have some.
inline int64_t runs_of(int64_t pieces, int64_t most, int64_t work) {
  if (work < 20000 || pool_size() == 1) return 1;
  return max_of(1, min_of(most, ceil_div(RUNS * pool_size(), pieces)));
}

// y of a piece's rows: steps [begin, end) of its slot's ranks.
template <class T>
inline void down_piece(const Adapters<T>& w, const AdapterRows& rows, const T* x, int64_t stride, const RowPiece& piece,
                       int64_t begin, int64_t end) {
  using A = typename ActivationTraits<T>::A;
  const int64_t K = w.inputs(), apart = K + INPUT_STEP;  // not all rows in the same lines of the first cache
  A* own = static_cast<A*>(scratch(SCRATCH_TASK, size_t(MAX_ROWS * apart) * sizeof(A)));
  over_tiles(piece.many, MAX_ROWS, [&](int64_t first, int64_t many) {
    const int64_t at = piece.begin + first;
    for (int64_t r = 0; r < many; ++r) copy_row(own + r * apart, x + rows.sorted.order[at + r] * stride, w.K, K);
    for (int64_t s = begin; s < end; ++s) {
      const Place place = place_of(s, [&](int64_t p) { return ceil_div(w.rank(piece.slot, p), RANK_STEP); });
      const T* lines = w.down_of(piece.slot, place.part, place.at);
      float* y = rows.y + at * rows.apart + s * RANK_STEP;
      with_rows(many, [&](auto known) {
        constexpr int R = decltype(known)::value, Q = lines_at_once<R>();
        for (int64_t q = 0; q < min_of(RANK_STEP, w.rank(piece.slot, place.part) - place.at * RANK_STEP); q += Q) {
          down_tile<R, Q>(own, apart, lines + q * K, K, w.scale(piece.slot, place.part), y + q, rows.apart);
        }
      });
    }
  });
}

// out[r] += up y[r], of R rows and V vectors of a panel; `left` of its features exist.
template <int R, int V, class T, class U>
inline void up_tile(const float* const* y, int64_t rank, const U* up, T* const* out, int64_t left) {
  vf acc[R][V];
  HR_UNROLL for (int r = 0; r < R; ++r)
    HR_UNROLL for (int v = 0; v < V; ++v) acc[r][v] = vzero();
  for (int64_t j = 0; j < rank; ++j) fma_step<R, V>(y, j, up + j * UP_PANEL, acc);
  for (int r = 0; r < R; ++r) {
    for (int64_t v = 0; v < V && v * W < left; ++v) {
      st_upto(out[r] + v * W, vadd(ld_upto(out[r] + v * W, left - v * W), acc[r][v]), left - v * W);
    }
  }
}

// All rows of a piece and one panel of a part.
template <class T, class U>
inline void up_panel(const AdapterRows& rows, const RowPiece& piece, int64_t y_at, int64_t rank, const U* up, T* out,
                     int64_t stride, int64_t features) {
  over_tiles(piece.many, MAX_ROWS, [&](int64_t first, int64_t many) {
    const float* y[MAX_ROWS];
    T* to[MAX_ROWS];
    for (int64_t r = 0; r < many; ++r) {
      y[r] = rows.y + (piece.begin + first + r) * rows.apart + y_at;
      to[r] = out + rows.sorted.order[piece.begin + first + r] * stride;
    }
    with_rows(many, [&](auto known) {
      constexpr int R = decltype(known)::value, V = R * 4 <= ACCUMULATORS ? 4 : 2;
      for (int64_t n = 0; n < features; n += V * W) {
        T* own[R];
        for (int r = 0; r < R; ++r) own[r] = to[r] + n;
        up_tile<R, V>(y, rank, up + n, own, features - n);
      }
    });
  });
}

// Some panels of one part: where they, a row's y and its outputs begin.
template <class T> struct PartPanels {
  int64_t rank, y_at;
  const T* up;
  T* out;
  int64_t panels, features;  // of all of them; the last may have fewer than UP_PANEL
};

// f(panels) for each part that has some of the slot's panels [begin, end), of all parts together.
template <class T, class F>
inline void over_parts(const Adapters<T>& w, int64_t slot, T* out, int64_t begin, int64_t end, const F& f) {
  const T* up = w.up + slot * w.up_size();
  for (int64_t part = 0, y_at = 0; part < w.parts; ++part) {
    const int64_t rank = w.rank(slot, part), panels = w.panels(part);
    const int64_t first = max_of(begin, 0), last = min_of(end, panels);
    if (rank > 0 && first < last) {
      f(PartPanels<T>{rank, y_at, up + first * w.panel_size(rank), out + first * UP_PANEL, last - first,
                      min_of(last * UP_PANEL, w.widths[part]) - first * UP_PANEL});
    }
    up += panels * w.panel_size(w.max_rank);
    y_at += round_up(rank, RANK_STEP);
    out += w.widths[part];
    begin -= panels;
    end -= panels;
  }
}

// out of a piece's rows: panels [begin, end) of all parts together.
template <class T>
inline void up_piece(const Adapters<T>& w, const AdapterRows& rows, T* out, int64_t stride, const RowPiece& piece,
                     int64_t begin, int64_t end) {
  over_parts(w, piece.slot, out, begin, end, [&](const PartPanels<T>& part) {
    const int64_t size = w.panel_size(part.rank);
    for (int64_t p = 0; p < part.panels; ++p) {
      const T* panel = part.up + p * size;
      const int64_t features = min_of(UP_PANEL, part.features - p * UP_PANEL);
      T* to = part.out + p * UP_PANEL;
      if (sizeof(T) == sizeof(float) || piece.many < WORTH_WIDENING) {
        up_panel(rows, piece, part.y_at, part.rank, panel, to, stride, features);
      } else {
        float* wide = static_cast<float*>(scratch(SCRATCH_TASK, size_t(size) * sizeof(float)));
        for (int64_t i = 0; i < size; i += W) st(wide + i, ld(panel + i));
        up_panel(rows, piece, part.y_at, part.rank, wide, to, stride, features);
      }
    }
  });
}

#if defined(HR_AMX)
// The same two by tiles.
inline void down_piece(const Adapters<bf16>& w, const AdapterRows& rows, const bf16* x, int64_t stride,
                       const RowPiece& piece, int64_t begin, int64_t end) {
  const int64_t K = w.inputs(), apart = K + INPUT_STEP;
  bf16* own = static_cast<bf16*>(scratch(SCRATCH_TASK, size_t(TILE_ROWS * (apart + K)) * sizeof(bf16)));
  over_tiles(piece.many, TILE_ROWS, [&](int64_t first, int64_t many) {
    const int64_t at = piece.begin + first;
    for (int64_t r = 0; r < many; ++r) copy_row(own + r * apart, x + rows.sorted.order[at + r] * stride, w.K, K);
    const bf16* pairs = paired_rows(own + TILE_ROWS * apart, own, apart, many, K);
    const TileShapes shapes(RANK_STEP, INPUT_STEP / 2, many == 1 ? 1 : W);
    for (int64_t s = begin, tiles; s < end; s += tiles) {
      const auto steps = [&](int64_t p) { return ceil_div(w.rank(piece.slot, p), RANK_STEP); };
      const Place place = place_of(s, steps);
      tiles = min_of(4, min_of(end - s, steps(place.part) - place.at));
      down_tiles(w.down_of(piece.slot, place.part, place.at), tiles, K, pairs, many,
                 w.scale(piece.slot, place.part), rows.y + at * rows.apart + s * RANK_STEP, rows.apart);
    }
  });
}

inline void up_piece(const Adapters<bf16>& w, const AdapterRows& rows, bf16* out, int64_t stride,
                     const RowPiece& piece, int64_t begin, int64_t end) {
  over_parts(w, piece.slot, out, begin, end, [&](const PartPanels<bf16>& part) {
    const int64_t step = ranks_of_tile(part.rank), blocks = ceil_div(part.rank, step);
    bf16* terms = static_cast<bf16*>(scratch(SCRATCH_TASK, size_t(blocks * TERMS * TILE_ROWS * BLOCK) * sizeof(bf16)));
    over_tiles(piece.many, TILE_ROWS, [&](int64_t first, int64_t many) {
      const int32_t* order = rows.sorted.order + piece.begin + first;
      split_rows(terms, rows.y + (piece.begin + first) * rows.apart + part.y_at, rows.apart, many, part.rank, step);
      const TileShapes shapes(many, step / 2);
      for (int64_t p = 0; p < part.panels; ++p) {
        alignas(64) float sums[TILE_ROWS * UP_PANEL];
        up_square(terms, part.up + p * w.panel_size(part.rank), part.rank, step, sums);
        for (int64_t r = 0; r < many; ++r) {
          bf16* to = part.out + order[r] * stride + p * UP_PANEL;
          for (int64_t n = 0, left; n < UP_PANEL && (left = part.features - p * UP_PANEL - n) > 0; n += W) {
            st_upto(to + n, vadd(ld_upto(to + n, left), ld(sums + r * UP_PANEL + n)), left);
          }
        }
      }
    });
  });
}
#endif

// f(piece, begin, end) for all pieces and for runs of what count(piece) says that each has.
template <class Count, class F>
inline void over_pieces(const AdapterRows& rows, int64_t most, int64_t work, const Count& count, const F& f) {
  const int64_t runs = runs_of(rows.count(), most, work);
  parallel(rows.count() * runs, work, [&](int64_t task) {
    const RowPiece piece = rows.piece(task / runs);
    const int64_t many = count(piece), run = task % runs;
    const int64_t begin = run * many / runs, end = (run + 1) * many / runs;
    if (begin < end) f(piece, begin, end);
  });
}

template <class T>
inline int32_t run_low_rank(T* out, const T* x, const Adapters<T>& w, const int32_t* slots, int64_t rows,
                            int64_t out_stride, int64_t x_stride) {
  Sorted sorted;
  const auto chosen = [&](int64_t i) {  // `slots` itself: no adapter
    return slots[i] == -1 ? w.slots : slots[i] < w.slots ? int64_t(slots[i]) : -1;
  };
  if (sort_by(rows, w.slots, 1, sorted, chosen) != OK) return BAD_INDEX;
  if (sorted.used == 0) return OK;
  int64_t most = 0;
  for (int64_t i = 0; i < sorted.used; ++i) most = max_of(most, w.steps(sorted.expert[i]));
  const int64_t apart = most * RANK_STEP, entries = sorted.entries(), panels = w.all_panels();
  float* y = static_cast<float*>(scratch(SCRATCH_A, size_t(entries * apart + sorted.used + 1) * sizeof(float)));
  int32_t* pieces = reinterpret_cast<int32_t*>(y + entries * apart);
  pieces[0] = 0;
  for (int64_t i = 0; i < sorted.used; ++i) {
    pieces[i + 1] = pieces[i] + int32_t(ceil_div(sorted.begin[i + 1] - sorted.begin[i], ADAPTER_ROWS));
  }
  const AdapterRows own{sorted, pieces, y, apart};
  over_pieces(own, most, entries * apart * w.K / 32, [&](const RowPiece& piece) { return w.steps(piece.slot); },
              [&](const RowPiece& piece, int64_t begin, int64_t end) {
    down_piece(w, own, x, x_stride, piece, begin, end);
  });
  over_pieces(own, panels, entries * apart * panels * UP_PANEL / 32, [&](const RowPiece&) { return panels; },
              [&](const RowPiece& piece, int64_t begin, int64_t end) {
    up_piece(w, own, out, out_stride, piece, begin, end);
  });
  return OK;
}

// slots [most_rows]: of each row the slot of its adapter, or -1. Strides are those of rows.
int32_t low_rank(void* out, const void* x, const void* down, const void* up, const int32_t* ranks,
                 const float* scales, const int64_t* widths, const int32_t* slots, int64_t rows, int64_t most_rows,
                 int64_t num_slots, int64_t parts, int64_t max_rank, int64_t K, int64_t out_stride, int64_t x_stride,
                 int32_t dtype) {
  int32_t status = OK;
  if (rows > most_rows) return BAD_LENGTHS;
  with_dtype(dtype, [&](auto* t) {
    using T = typename pointee<decltype(t)>::type;
    const Adapters<T> w{static_cast<const T*>(down), static_cast<const T*>(up), ranks, scales, widths,
                        num_slots, parts, max_rank, K};
    status = run_low_rank(static_cast<T*>(out), static_cast<const T*>(x), w, slots, rows, out_stride, x_stride);
  });
  return status;
}

}  // namespace
}  // namespace headrace::HR_ISA
