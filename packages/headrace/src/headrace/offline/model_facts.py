"""Facts about a loaded model under the names that scripts read: :class:`ModelFacts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace.assembly.served import HIDDEN_SIZES
from headrace_core.model import ModelInfo
from headrace_core.served_model import ServedModel
from headrace_engine.config import EngineConfig

if TYPE_CHECKING:
    import torch

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Keys of a config that say how many layers a model has."""


class HFConfig(Mapping[str, Any]):
    """A checkpoint's ``config.json``, read as attributes or as a mapping; nested objects too.

    It holds what the file says, and the user's ``hf_overrides``; transformers' defaults are not added.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__["_values"] = values

    def __getattr__(self, name: str) -> Any:
        values: Mapping[str, Any] = self.__dict__["_values"]
        if name not in values:
            raise AttributeError(f"config.json has no {name!r}")
        return _read(values[name])

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: the config of a loaded model cannot be changed")

    def __getitem__(self, name: str) -> Any:
        return _read(self.__dict__["_values"][name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__["_values"])

    def __len__(self) -> int:
        return len(self.__dict__["_values"])

    def to_dict(self) -> dict[str, Any]:
        """All of it as a new dictionary."""
        return {name: _plain(value) for name, value in self.__dict__["_values"].items()}

    def __repr__(self) -> str:
        return f"HFConfig({self.to_dict()!r})"


@dataclass(frozen=True)
class ModelFacts:
    """A loaded model and how it runs; ``model_config`` of ``LLM``, ``LLMEngine`` and ``AsyncLLM``."""

    served: ServedModel
    info: ModelInfo
    config: EngineConfig

    @property
    def model(self) -> str:
        """The folder or hub name that the user gave."""
        return self.info.name

    @property
    def path(self) -> str:
        """The local folder of the checkpoint."""
        return str(self.info.path)

    @property
    def tokenizer(self) -> str:
        """The folder or hub name that the tokenizer was read from."""
        return self.config.model.tokenizer or self.info.name

    @property
    def served_model_name(self) -> str:
        """The first name under which the model is served."""
        return self.served.name

    @property
    def max_model_len(self) -> int:
        """Longest context, in tokens, as the engine made room for it."""
        return self.served.max_model_len

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        import torch

        found: torch.dtype = getattr(torch, self.info.dtype)
        return found

    @property
    def seed(self) -> int | None:
        """The engine's seed."""
        return self.config.model.seed

    @property
    def trust_remote_code(self) -> bool:
        """True if Python code of the checkpoint may run."""
        return self.info.trust_remote_code

    @cached_property
    def hf_config(self) -> HFConfig:
        """``config.json`` with the user's overrides."""
        return HFConfig(self.info.whole_config or self.info.config)

    @cached_property
    def hf_text_config(self) -> HFConfig:
        """The part of ``config.json`` that describes the language model."""
        return HFConfig(self.info.config)

    @property
    def architecture(self) -> str:
        """The class name under which the model is served."""
        return self.info.architecture

    @property
    def architectures(self) -> list[str]:
        """The class names that ``config.json`` lists."""
        return list(self.hf_config.get("architectures") or [self.info.architecture])

    @property
    def runner_type(self) -> str:
        """``generate`` or ``pooling``."""
        return self.info.runner

    @property
    def is_encoder_decoder(self) -> bool:
        """True for a model whose decoder attends to an encoder."""
        return self.info.is_encoder_decoder

    @property
    def is_multimodal_model(self) -> bool:
        """True if prompts may bring media."""
        return bool(self.served.modalities)

    @property
    def max_logprobs(self) -> int:
        """The most log-probabilities that a request may ask for at a position."""
        return self.served.max_logprobs

    def get_vocab_size(self) -> int:
        """Width of the logits."""
        return self.info.vocab_size

    def get_hidden_size(self) -> int:
        """Numbers of one token's state.

        Raises:
            AttributeError: ``config.json`` does not say.
        """
        return _stated(self.hf_text_config, HIDDEN_SIZES)

    def get_num_layers(self) -> int:
        """Layers of the language model.

        Raises:
            AttributeError: ``config.json`` does not say.
        """
        return _stated(self.hf_text_config, LAYER_COUNTS)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Sampling defaults of the checkpoint's generation config, by fields of SamplingParams."""
        return dict(self.served.default_sampling_params)

    def __repr__(self) -> str:
        return (
            f"ModelFacts(model={self.model!r}, architecture={self.architecture!r}, "
            f"dtype={self.info.dtype!r}, max_model_len={self.max_model_len})"
        )


def _stated(config: HFConfig, names: tuple[str, ...]) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise AttributeError(f"config.json has none of {', '.join(names)}")


def _read(value: Any) -> Any:
    return HFConfig(value) if isinstance(value, Mapping) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
