"""The plain-torch definition of every op of :mod:`headrace_core.ops`: slow, obvious, the oracle.

One module per idea, one per op that few families need. Each function has the name, shapes and meaning of the
protocol it fulfils; its fake, which computes shapes only, stands beside it as ``fake_...``, and
:func:`headrace_reference.definitions.definitions` finds both by the op's name.
Everything runs on any torch device and dtype. Statistics and accumulation are in float32, or in
float64 when the input is float64, which is how the tests get their expected values. It is also
what a machine without native kernels computes with, so it is whole, if not fast.

Linear layers are torch's own, so results may depend on the number of rows: the reference does not
claim row invariance.
"""

from headrace_reference.activations import (
    activation,
    activation_and_mul,
)
from headrace_reference.attention import (
    paged_attention,
    varlen_attention,
)
from headrace_reference.cache import (
    cache_write,
    rotary_cache_write,
)
from headrace_reference.elementwise import (
    add,
    copy_rows,
    gate,
    scale,
    to_float32,
)
from headrace_reference.embedding import embedding
from headrace_reference.linear import head_linear, linear
from headrace_reference.logprobs import top_logprobs
from headrace_reference.mla import mla_attention, mla_cache_write
from headrace_reference.moe import expert_linear, moe
from headrace_reference.norms import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
)
from headrace_reference.quantized import quant_linear
from headrace_reference.recurrent import (
    causal_conv,
    delta_rule,
    gated_rms_norm,
    selective_scan,
    state_space_scan,
)
from headrace_reference.rotary import rotary
from headrace_reference.routing import route_experts
from headrace_reference.sampling import sample

__all__ = [
    "activation",
    "activation_and_mul",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "cache_write",
    "causal_conv",
    "copy_rows",
    "delta_rule",
    "embedding",
    "expert_linear",
    "gate",
    "gated_rms_norm",
    "head_linear",
    "layer_norm",
    "linear",
    "mla_attention",
    "mla_cache_write",
    "moe",
    "paged_attention",
    "quant_linear",
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
]
