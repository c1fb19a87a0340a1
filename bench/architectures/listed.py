"""The model classes of the installed transformers, one for each model type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# In the order in which a head is looked for; the first that a model type has is the one taken.
MAPPINGS = (
    ("masked", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    ("multimodal", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    ("multimodal", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    ("multimodal", "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES"),
    ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("vision", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    ("vision", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"),
    ("vision", "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES"),
    ("vision", "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES"),
    ("vision", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES"),
    ("vision", "MODEL_FOR_IMAGE_TO_IMAGE_MAPPING_NAMES"),
    ("audio", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    ("audio", "MODEL_FOR_CTC_MAPPING_NAMES"),
    ("audio", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    ("vision", "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES"),
    ("multimodal", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"),
    ("causal", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    ("base", "MODEL_MAPPING_NAMES"),
)
KINDS = tuple(dict.fromkeys(kind for kind, _ in MAPPINGS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model type and the head that stands for it."""

    model_type: str
    kind: str
    model: str  # the name of the model class
    head: str  # the mapping that knows it: CAUSAL_LM

    def model_class(self) -> type[Any]:
        import transformers

        attribute = getattr(transformers, self.model, None)
        if attribute is None:
            raise LookupError(f"transformers has no {self.model}")
        return attribute  # type: ignore[no-any-return]


def architectures() -> list[Architecture]:
    """Every model type that some mapping knows, sorted by kind and name."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    by_name: dict[str, Architecture] = {}
    for kind, mapping in MAPPINGS:
        for model_type, names in getattr(modeling_auto, mapping).items():
            name = names if isinstance(names, str) else names[0]
            head = mapping.removeprefix("MODEL_").removeprefix("FOR_").removesuffix("MAPPING_NAMES").rstrip("_")
            stored = Architecture(model_type=model_type, kind=kind, model=name, head=head)
            by_name.setdefault(model_type, stored)
    own = [
        value for value in by_name.values() if CONFIG_MAPPING[value.model_type].model_type == value.model_type
    ]  # no alias
    return sorted(own, key=lambda value: (KINDS.index(value.kind), value.model_type))
