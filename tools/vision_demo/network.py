"""The network: LLaVA's class at a few million parameters."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from vision_demo.pictures import COLOURS, SHAPES, SIZE
from vision_demo.text import IMAGE, SPECIAL

PATCH = 12
IMAGE_TOKENS = (SIZE // PATCH) ** 2
POSITIONS = 1024


def build(vocabulary: int) -> LlavaForConditionalGeneration:
    """With random weights."""
    tower = CLIPVisionConfig(
        image_size=SIZE,
        patch_size=PATCH,
        hidden_size=160,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=5,
        projection_dim=160,
        hidden_act="gelu",
    )
    text = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-6,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_id=SPECIAL.index(IMAGE),
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


class Teacher(nn.Module):
    """What a scene holds, told from the mean of the tower's patches: shortens training, and is thrown away.

    For each shape how many there are and which colour they have, the digit, and the background.
    """

    COUNTS = 6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.counts = nn.Linear(2 * width, len(SHAPES) * self.COUNTS)
        self.colours = nn.Linear(2 * width, len(SHAPES) * (len(COLOURS) + 1))
        self.digit = nn.Linear(2 * width, 11)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, P, width] -> [B, shapes, COUNTS], [B, shapes, colours + 1], [B, 11]."""
        from torch import cat

        pooled = cat([patches.mean(1), patches.amax(1)], -1)
        counts = self.counts(pooled).unflatten(-1, (len(SHAPES), -1))
        colours = self.colours(pooled).unflatten(-1, (len(SHAPES), -1))
        return counts, colours, self.digit(pooled)
