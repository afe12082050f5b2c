// Tiles of AMX (Intel, "Intrinsics Guide"): what products of bytes and of bfloat16 pairs share.

#if defined(HR_AMX)

// Tiles 0 to 3 hold sums, 4 and 5 lines, 6 and 7 weights. The compiler knows nothing of tiles.
#define HR_TILE_LOAD(tile, at, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"(int64_t(stride)) : "memory")
#define HR_TILE_STORE(tile, at, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"(int64_t(stride)) : "memory")
#define HR_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::: "memory")
#define HR_TILE_DOT(sum, lines, weights) \
  asm volatile("tdpbssd %%tmm" #weights ", %%tmm" #lines ", %%tmm" #sum ::: "memory")
#define HR_TILE_DOT_BF16(sum, rows, weights) \
  asm volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum ::: "memory")

namespace headrace::HR_ISA {
namespace {

// Sets the shapes of the tiles while it lives: `lines` of sums and activations, `steps` of K, which are four
// bytes of an activation each, and columns of sums and weights.
class TileShapes {
 public:
  TileShapes(int64_t lines, int64_t steps, int64_t columns = 16) {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = uint8_t(tile < 6 ? lines : steps);
      config.row_bytes[tile] = uint16_t(4 * (tile == 4 || tile == 5 ? steps : columns));
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~TileShapes() { asm volatile("tilerelease" ::: "memory"); }
  TileShapes(const TileShapes&) = delete;
};

}  // namespace
}  // namespace headrace::HR_ISA

#endif
