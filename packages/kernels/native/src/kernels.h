// All kernels of one instruction set. Included once by each isa_*.cpp, which defines HR_ISA, the
// namespace, and what the machine has (HR_AVX2, HR_AVX512, HR_DOT_BF16, HR_AMX, or nothing).

#include "common.h"
#include "vec.h"

#include "rowwise.h"
#include "elementwise.h"
#include "strided.h"
#include "routing.h"
#include "rotary_cache.h"
#include "packing.h"
#include "side_by_side.h"
#include "panel_product.h"
#include "tiles.h"
#include "linear_tiles.h"
#include "linear.h"
#include "quant_layout.h"
#include "quant_tiles.h"
#include "amx_tiles.h"
#include "quant_panels.h"
#include "float8_tiles.h"
#include "quant_linear.h"
#include "quant_rounding.h"
#include "k_quant_rounding.h"
#include "packed_rows.h"
#include "head_linear.h"
#include "sorted_entries.h"
#include "moe.h"
#include "quant_experts.h"
#include "attention_tiles.h"
#include "attention_units.h"
#include "attention_paired.h"
#include "attention_paired_tiles.h"
#include "attention.h"
#include "attention_varlen.h"
#include "attention_latent.h"
#include "index_tokens.h"
#include "key_share.h"
#include "low_rank_tiles.h"
#include "low_rank.h"
#include "recurrent.h"
#include "sampling.h"
#include "packed.h"

namespace headrace::HR_ISA {

#define HR_ENTRY(name) {#name, reinterpret_cast<void*>(&name), &Uniform<&name>::call, Uniform<&name>::signature}
extern const Entry entries[];
#if defined(HR_AMX)
// Those that tiles make faster: the rest is the level below's.
const Entry entries[] = {
    HR_ENTRY(quant_linear),
    HR_ENTRY(quant_linear_gated),
    HR_ENTRY(quant_routed),
    HR_ENTRY(linear),
    HR_ENTRY(linear_activated),
    HR_ENTRY(linear_gated),
    HR_ENTRY(moe),
    HR_ENTRY(expert_linear),
    HR_ENTRY(low_rank),
    HR_ENTRY(paged_attention),
    HR_ENTRY(varlen_attention),
    HR_ENTRY(latent_attention),
    {nullptr, nullptr, nullptr, nullptr},
};
#else
const Entry entries[] = {
    HR_ENTRY(embedding),
    HR_ENTRY(rms_norm),
    HR_ENTRY(add_rms_norm),
    HR_ENTRY(layer_norm),
    HR_ENTRY(add_layer_norm),
    HR_ENTRY(activation),
    HR_ENTRY(activation_and_mul),
    HR_ENTRY(xielu),
    HR_ENTRY(add),
    HR_ENTRY(scale),
    HR_ENTRY(gate),
    HR_ENTRY(clamp),
    HR_ENTRY(copy_rows),
    HR_ENTRY(mix),
    HR_ENTRY(match_rms),
    HR_ENTRY(gaussian_topk),
    HR_ENTRY(to_float32),
    HR_ENTRY(elementwise),
    HR_ENTRY(route_experts),
    HR_ENTRY(rotary),
    HR_ENTRY(cache_write),
    HR_ENTRY(rotary_cache_write),
    HR_ENTRY(linear_packed_bytes),
    HR_ENTRY(linear_pack),
    HR_ENTRY(linear),
    HR_ENTRY(linear_activated),
    HR_ENTRY(linear_gated),
    HR_ENTRY(quant_linear_packed_bytes),
    HR_ENTRY(quant_linear_pack),
    HR_ENTRY(quant_linear_round),
    HR_ENTRY(round_k_quant),
    HR_ENTRY(quant_linear),
    HR_ENTRY(quant_linear_gated),
    HR_ENTRY(quant_linear_rows),
    HR_ENTRY(quant_routed),
    HR_ENTRY(linear_rows),
    HR_ENTRY(moe),
    HR_ENTRY(expert_linear),
    HR_ENTRY(low_rank),
    HR_ENTRY(paged_attention),
    HR_ENTRY(varlen_attention),
    HR_ENTRY(latent_cache_write),
    HR_ENTRY(latent_attention),
    HR_ENTRY(index_tokens),
    HR_ENTRY(key_share),
    HR_ENTRY(lse_correction),
    HR_ENTRY(head_linear),
    HR_ENTRY(causal_conv),
    HR_ENTRY(selective_scan),
    HR_ENTRY(state_space_scan),
    HR_ENTRY(delta_rule),
    HR_ENTRY(rg_lru),
    HR_ENTRY(wkv),
    HR_ENTRY(mlstm),
    HR_ENTRY(gated_rms_norm),
    HR_ENTRY(sample),
    HR_ENTRY(top_logprobs),
    {nullptr, nullptr, nullptr, nullptr},
};
#endif
#undef HR_ENTRY

}  // namespace headrace::HR_ISA
