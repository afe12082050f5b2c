"""The plain-torch definition of every op of :mod:`headrace_core.ops`: slow, obvious, the oracle.

One module per idea; each function has the name, shapes and meaning of the protocol it fulfils.
Everything runs on any torch device and dtype. Statistics and accumulation are in float32, or in
float64 when the input is float64, which is how the tests get their expected values. It is also
what a machine without native kernels computes with, so it is whole, if not fast.

Linear layers are torch's own, so results may depend on the number of rows: the reference does not
claim row invariance.
"""

from headrace_core.reference.activations import (
    activation,
    activation_and_mul,
    gaussian_topk,
    xielu,
)
from headrace_core.reference.attention import (
    index_tokens,
    latent_attention,
    paged_attention,
    varlen_attention,
)
from headrace_core.reference.cache import (
    cache_write,
    latent_cache_write,
    rotary_cache_write,
)
from headrace_core.reference.elementwise import (
    add,
    clamp,
    copy_rows,
    gate,
    mix,
    scale,
    to_float32,
)
from headrace_core.reference.embedding import embedding
from headrace_core.reference.linear import head_linear, linear
from headrace_core.reference.logprobs import top_logprobs
from headrace_core.reference.moe import expert_linear, moe
from headrace_core.reference.norms import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    match_rms,
    rms_norm,
)
from headrace_core.reference.quantized import quant_linear
from headrace_core.reference.recurrent import (
    causal_conv,
    delta_rule,
    gated_rms_norm,
    mlstm,
    rg_lru,
    selective_scan,
    state_space_scan,
    wkv,
)
from headrace_core.reference.rotary import rotary
from headrace_core.reference.routing import route_experts
from headrace_core.reference.sampling import sample

__all__ = [
    "activation",
    "activation_and_mul",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "cache_write",
    "causal_conv",
    "clamp",
    "copy_rows",
    "delta_rule",
    "embedding",
    "expert_linear",
    "gate",
    "gated_rms_norm",
    "gaussian_topk",
    "head_linear",
    "index_tokens",
    "latent_attention",
    "latent_cache_write",
    "layer_norm",
    "linear",
    "match_rms",
    "mix",
    "mlstm",
    "moe",
    "paged_attention",
    "quant_linear",
    "rg_lru",
    "rms_norm",
    "rotary",
    "rotary_cache_write",
    "route_experts",
    "sample",
    "scale",
    "selective_scan",
    "state_space_scan",
    "to_float32",
    "top_logprobs",
    "varlen_attention",
    "wkv",
    "xielu",
]
