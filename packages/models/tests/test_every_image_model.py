"""All that transformers has for images and text: each is served, exactly, or refused with a reason.

What came of each stands in ``transformers_image_models.json``, of which a part of
docs/supported/transformers.md is made (``python tools/transformers_page.py``).
"""

from __future__ import annotations

from pathlib import Path

import every_image_model
import pytest
import transformers
from every_image_model import SERVED

from headrace_models.transformers_backend.refusals import IMAGES_REFUSED, IMAGES_SERVED

pytestmark = pytest.mark.filterwarnings("ignore")  # of model code that is not ours
STORED = every_image_model.stored()
TRIED = [kind for kind, row in STORED.items() if not row.result.startswith("not tried")]


@pytest.mark.keep(8, every_value=False)
@pytest.mark.parametrize("kind", TRIED)
def test_it_is_served_exactly_or_refused_with_a_reason(kind: str, tmp_path: Path) -> None:
    """Text, an image, two images, and pieces of a prompt that end within an image."""
    known = every_image_model.model_types()
    if kind not in known:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    if kind in every_image_model.NEEDS_TIMM:
        pytest.importorskip("timm")
    transformers.logging.set_verbosity_error()
    assert every_image_model.outcome_of(kind, known[kind], tmp_path) == STORED[kind].result


def test_the_table_is_whole_and_none_differs() -> None:
    if transformers.__version__ == every_image_model.measured_with():
        assert {k: row.architecture for k, row in STORED.items()} == every_image_model.model_types()
    assert not [row for row in STORED.values() if row.result.startswith("DIFFERS")]
    assert sum(row.result == SERVED for row in STORED.values()) >= 30


def test_what_is_chosen_for_its_images_is_served() -> None:
    served = {row.architecture for row in STORED.values() if row.result == SERVED}
    assert set(IMAGES_SERVED) <= served
    assert not {STORED[kind].architecture for kind in IMAGES_REFUSED} & served
