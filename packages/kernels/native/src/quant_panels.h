// One panel times a task's rows, by vectors or by tiles, its minimums included.

namespace headrace::HR_ISA {
namespace {
namespace quant {

// Minimums of group g; `at` is where the panel's begin.
inline vf minimums_at(const uint8_t* at, int32_t stored, int64_t g, int v) {
  if (stored != NIBBLE) return values_at(at + g * QPANEL * bytes_of_stored(stored), stored, v);
  const Raw two = (Raw)ild_bytes(at + g / 2 * QPANEL + v * W);
  return to_floats((vi)kept(lowered(two, g % 2 ? 4 : 0), raw_mask(15)));
}

// real [R][QPANEL] -= the minimums times the rows' totals, block by block.
template <int R> inline void subtract_minimums(const Panel& p, const FixedRows& f, int64_t row, float* real) {
  const Layout& l = *p.layout;
  const uint8_t *minimums = p.front + p.minimums_at, *outers = p.front + p.block_minimums_at;
  const float* totals = f.totals + row * f.groups;
  for (int64_t g = 0, b = 0; g < f.groups; ++b, outers += QPANEL * bytes_of_stored(l.block_minimums)) {
    vf sum[R][QV];
    HR_UNROLL for (int r = 0; r < R; ++r) HR_UNROLL for (int v = 0; v < QV; ++v) sum[r][v] = vzero();
    for (const int64_t end = min_of(g + p.block_groups, f.groups); g < end; ++g) {
      HR_UNROLL for (int v = 0; v < QV; ++v) {
        const vf minimum = minimums_at(minimums, l.minimums, g, v);
        HR_UNROLL for (int r = 0; r < R; ++r) sum[r][v] = vfma(minimum, vset(totals[r * f.groups + g]), sum[r][v]);
      }
    }
    HR_UNROLL for (int v = 0; v < QV; ++v) {
      const vf outer = l.block_minimums == ABSENT ? vset(1.0f) : values_at(outers, l.block_minimums, v);
      HR_UNROLL for (int r = 0; r < R; ++r) {
        float* to = real + r * QPANEL + v * W;
        st(to, vsub(ld(to), vmul(sum[r][v], outer)));
      }
    }
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
  if (f.totals == nullptr) return;
  constexpr int TOGETHER = TILE_V == QV ? 4 : 2;  // rows whose sums fit into registers
  int64_t i = 0;
  for (; i + TOGETHER <= rows; i += TOGETHER) subtract_minimums<TOGETHER>(p, f, begin + i, sums.real + i * QPANEL);
  for (; i < rows; ++i) subtract_minimums<1>(p, f, begin + i, sums.real + i * QPANEL);
}

// Room for `sets` panels' sums of a task's rows, in SCRATCH_TASK. Whole tiles of lines are written.
inline Sums task_sums(int sets) {
  constexpr int64_t ROOM = (TASK_LINES + 32) * QPANEL, SCALES = MANY_PIECE_BYTES / 32;
  Sums sums;
  sums.bytes = static_cast<uint8_t*>(
      scratch(SCRATCH_TASK, size_t(MANY_PIECE_BYTES + (ROOM * (sets + 1) + SCALES) * 4)));
  sums.scales = reinterpret_cast<float*>(sums.bytes + MANY_PIECE_BYTES);
  sums.real = sums.scales + SCALES;
  sums.whole = reinterpret_cast<int32_t*>(sums.real + sets * ROOM);
  return sums;
}

}  // namespace quant
}  // namespace
}  // namespace headrace::HR_ISA
