from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import RequestError
from headrace_core.pooling import PoolingParams
from headrace_engine.pooling.activation import check_activation
from headrace_testing.fakes.pooling import fake_pooling_info


@pytest.mark.parametrize(
    ("scoring", "said"), [("cosine", "the cosine"), ("late_interaction", "best")]
)
@pytest.mark.parametrize("name", ["use_activation", "softmax", "activation"])
def test_an_embedding_model_s_scores_have_no_activation(scoring: str, said: str, name: str) -> None:
    value: Any = {name: False}
    asked = PoolingParams(**value)
    with pytest.raises(
        RequestError, match=rf"{name} = False: .* embedding model .*/score.*{said}"
    ) as caught:
        check_activation(asked, fake_pooling_info(scoring=scoring))
    assert caught.value.param == name
    check_activation(PoolingParams(normalize=True), fake_pooling_info(scoring=scoring))
    check_activation(asked, fake_pooling_info(scoring="cross"))
