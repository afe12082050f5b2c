// One panel times a task's rows, by vectors or by tiles, its minimums included.

namespace headrace::HR_ISA {
namespace {
namespace quant {

// Minimums of group g; `at` is where the panel's begin.
HR_INLINE inline void minimums_at(const uint8_t* at, int32_t stored, int64_t g, vf (&x)[QV]) {
  if (stored != NIBBLE) return values_of<QV>(at + g * QPANEL * bytes_of_stored(stored), stored, 0, x);
  HR_UNROLL for (int v = 0; v < QV; ++v) {
    const Raw two = (Raw)ild_bytes(at + g / 2 * QPANEL + v * W);
    x[v] = to_floats((vi)kept(lowered(two, g % 2 ? 4 : 0), raw_mask(15)));
  }
}

constexpr int64_t READY_GROUPS = 64;  // whose minimums are summed up at a time

// Reads what a panel subtracts: the minimum of group g, times that of its block.
struct Minimums {
  const Panel& panel;
  vf outer[QV];
  int64_t left = 0;  // groups of the block

  explicit Minimums(const Panel& p) : panel(p) {
    HR_UNROLL for (int v = 0; v < QV; ++v) outer[v] = vset(1.0f);
  }
  // Group by group, from the first on.
  HR_INLINE void read(int64_t g, vf (&to)[QV]) {
    const Panel& p = panel;
    const Layout& l = *p.layout;
    if (left == 0 && l.block_minimums != ABSENT) {
      const int64_t b = g / p.block_groups;
      values_of<QV>(p.front + p.block_minimums_at + b * QPANEL * bytes_of_stored(l.block_minimums), l.block_minimums, 0, outer);
      left = p.block_groups;
    }
    --left;
    minimums_at(p.front + p.minimums_at, l.minimums, g, to);
    HR_UNROLL for (int v = 0; v < QV; ++v) to[v] = vmul(to[v], outer[v]);
  }
};

// real [R][QPANEL] -= minimums(g), g in [begin, end), times the rows' totals.
template <int R, class F>
HR_INLINE inline void subtract_minimums(const F& minimums, const FixedRows& f, int64_t row, int64_t begin, int64_t end,
                                        float* real) {
  const float* totals = f.totals + row * f.groups;
  vf sum[R][QV];
  HR_UNROLL for (int r = 0; r < R; ++r) HR_UNROLL for (int v = 0; v < QV; ++v) sum[r][v] = vzero();
  for (int64_t g = begin; g < end; ++g) {
    vf minimum[QV];
    minimums(g, minimum);
    HR_UNROLL for (int r = 0; r < R; ++r) {
      const vf total = vset(totals[r * f.groups + g]);
      HR_UNROLL for (int v = 0; v < QV; ++v) sum[r][v] = vfma(minimum[v], total, sum[r][v]);
    }
  }
  HR_UNROLL for (int r = 0; r < R; ++r) {
    HR_UNROLL for (int v = 0; v < QV; ++v) {
      float* to = real + r * QPANEL + v * W;
      st(to, vsub(ld(to), sum[r][v]));
    }
  }
}

// sums.real [rows][QPANEL] -= a panel's minimums. Many rows share those of some groups as they lie ready.
inline void subtract_minimums_of(const Panel& p, const FixedRows& f, int64_t first, int64_t rows, Sums sums) {
  constexpr int TOGETHER = TILE_V == QV ? 4 : 2;  // rows whose sums fit into registers
  Minimums minimums(p);
  for (int64_t begin = 0; begin < f.groups; begin += READY_GROUPS) {
    const int64_t end = min_of(begin + READY_GROUPS, f.groups);
    if (rows == 1) {
      subtract_minimums<1>([&](int64_t g, vf (&to)[QV]) HR_INLINE { minimums.read(g, to); }, f, first, begin, end, sums.real);
      continue;
    }
    float* const ready = sums.scales;
    for (int64_t g = begin; g < end; ++g) {
      vf x[QV];
      minimums.read(g, x);
      HR_UNROLL for (int v = 0; v < QV; ++v) st(ready + (g - begin) * QPANEL + v * W, x[v]);
    }
    const auto of = [&](int64_t g, vf (&to)[QV]) HR_INLINE {
      HR_UNROLL for (int v = 0; v < QV; ++v) to[v] = ld(ready + (g - begin) * QPANEL + v * W);
    };
    int64_t i = 0;
    for (; i + TOGETHER <= rows; i += TOGETHER) subtract_minimums<TOGETHER>(of, f, first + i, begin, end, sums.real + i * QPANEL);
    for (; i < rows; ++i) subtract_minimums<1>(of, f, first + i, begin, end, sums.real + i * QPANEL);
  }
}

// As panel_pass, in the way that is fastest for so many rows.
template <int LIMBS>
inline void panel_lines(const Panel& p, int pass, const uint8_t* after, const FixedRows& f, int64_t begin,
                        int64_t rows, Sums sums) {
#if defined(HR_AMX)
  if (suits_tiles(p, LIMBS, rows)) return tiles_pass<LIMBS>(p, pass, f, begin, rows, sums);
#endif
  panel_pass<LIMBS>(p, pass, after, f, begin, rows, sums);
}

// sums.real [rows][QPANEL] = fixed-point rows [begin, begin + rows) times one panel.
inline void panel_rows_of(const Panel& p, const uint8_t* after, const FixedRows& f, int64_t begin, int64_t rows,
                          Sums sums) {
  if (p.steps == 0) __builtin_memset(sums.real, 0, size_t(rows * QPANEL) * sizeof(float));
  for (int pass = 0; pass < max_of(1, p.layout->tables); ++pass) {
    switch (f.limbs) {
      case 1: panel_lines<1>(p, pass, after, f, begin, rows, sums); break;
      case 2: panel_lines<2>(p, pass, after, f, begin, rows, sums); break;
      case 3: panel_lines<3>(p, pass, after, f, begin, rows, sums); break;
    }
  }
  if (f.totals != nullptr) subtract_minimums_of(p, f, begin, rows, sums);
}

// Room for `sets` panels' sums of a task's rows, in SCRATCH_TASK. Whole tiles of lines are written.
inline Sums task_sums(int sets) {
  constexpr int64_t ROOM = (TASK_LINES + 32) * QPANEL, SCALES = MANY_PIECE_BYTES / 32;
  static_assert(READY_GROUPS * QPANEL <= SCALES, "minimums lie where scales do");
  Sums sums;
  sums.bytes = static_cast<uint8_t*>(
      scratch(SCRATCH_TASK, size_t(MANY_PIECE_BYTES + (ROOM * (sets + 2) + SCALES) * 4)));
  sums.scales = reinterpret_cast<float*>(sums.bytes + MANY_PIECE_BYTES);
  sums.real = sums.scales + SCALES;
  sums.whole = reinterpret_cast<int32_t*>(sums.real + sets * ROOM);
  sums.blocks = sums.whole + ROOM;
  return sums;
}

}  // namespace quant
}  // namespace
}  // namespace headrace::HR_ISA
